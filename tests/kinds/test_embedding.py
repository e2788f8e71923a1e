from __future__ import annotations

import pytest

from fuselora.kinds import BadParts, Shapes
from fuselora.kinds.embedding import EMBEDDING
from fuselora.lora.grammar import parse_key

PAIR: Shapes = {"embedding_down": (2, 30), "embedding_up": (8, 2)}


def test_shape_and_rank() -> None:
    assert EMBEDDING.shape(PAIR, ()) == (30, 8)
    assert EMBEDDING.rank(PAIR) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"embedding_up": (8, 3)},
        {"embedding_up": (2, 8)},
        {"embedding_up": (8,)},
        {"embedding_down": (2, 30, 1)},
        {"embedding_down": ()},
    ],
)
def test_parts_that_make_no_delta(wrong: Shapes) -> None:
    with pytest.raises(BadParts):
        EMBEDDING.shape({**PAIR, **wrong}, ())


@pytest.mark.parametrize(("letter", "part"), [("A", "embedding_down"), ("B", "embedding_up")])
@pytest.mark.parametrize("name", ["", "default", "my.style"])
@pytest.mark.parametrize("leaf", ["", ".weight"])
def test_keys(letter: str, part: str, name: str, leaf: str) -> None:
    named = f".{name}" if name else ""
    parsed = parse_key(f"base_model.model.x.lora_embedding_{letter}{named}{leaf}")
    assert parsed
    assert (parsed.module, parsed.part, parsed.name) == ("base_model.model.x", part, name)
