"""Numbers of things in words."""

from __future__ import annotations

from fuselora.kinds import KINDS
from fuselora.kinds.experts import EXPERTS
from fuselora.plural import many, tally


def test_one_and_many() -> None:
    assert [many(n, "module") for n in (0, 1, 2)] == ["0 modules", "1 module", "2 modules"]


def test_what_there_is_none_of_is_not_said() -> None:
    assert tally({"pairs": 1, "diff": 0, "loha": 1, "pair_biases": 2}) == "1 pair, 1 loha, 2 pair_biases"
    assert tally({"pairs": 0}) == ""


def test_one_of_every_kind() -> None:
    """The names of the others are no plurals."""
    names = {kind.counted for kind in (*KINDS, EXPERTS)}
    changed = {name: tally({name: 1}) for name in names if tally({name: 1}) != f"1 {name}"}
    assert changed == {
        "pairs": "1 pair", "experts": "1 expert", "embeddings": "1 embedding", "pair_biases": "1 pair_bias",
    }  # fmt: skip
