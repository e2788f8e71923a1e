"""Which LoRA an option with ``[FILE=]`` is for: by one rule for all such options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fuselora.errors import Refused
from fuselora.file_options import in_layouts, misdirected, option_of_each
from fuselora.pipeline import plan
from fuselora.resolve import LoraLocation
from fuselora.specs import AlphaSpec, LayoutSpec, LoraSpec
from tests.cases.builders import save, save_json
from tests.small import pair

FOLDER = ("/x/d", "adapter_model.safetensors")
FILE = ("/y/a.safetensors", "a.safetensors")
TWIN = ("/z/a.safetensors", "a.safetensors")
BARE = ("a.safetensors", "a.safetensors")


def at(source: str, name: str, layout: str | None = None) -> LoraLocation:
    return LoraLocation(LoraSpec(source, layout=layout), Path(source), name, None)


@pytest.mark.parametrize(
    ("given", "said", "meant"),
    [
        ([FOLDER, FILE], "/x/d", ["/x/d"]),
        ([FOLDER, FILE], "d", ["/x/d"]),
        ([FOLDER, FILE], "adapter_model.safetensors", ["/x/d"]),
        ([FOLDER, FILE], "a.safetensors", ["/y/a.safetensors"]),
        ([FOLDER, FILE], None, ["/x/d", "/y/a.safetensors"]),
        ([FILE, FILE], "a.safetensors", ["/y/a.safetensors"]),
        ([FILE, BARE], "a.safetensors", ["a.safetensors"]),
    ],
)
def test_who_is_meant(given: list[tuple[str, str]], said: str | None, meant: list[str]) -> None:
    locations = [at(*one) for one in given]
    assert sorted(option_of_each(locations, [AlphaSpec(8.0, said)])) == meant
    assert list(misdirected(locations, [AlphaSpec(8.0, said)], "--alpha")) == []


@pytest.mark.parametrize(
    ("given", "said", "fault", "hint"),
    [
        ([FILE, TWIN], "a.safetensors", "ambiguous", "Say which: /y/a.safetensors or /z/a.safetensors."),
        ([FOLDER, FILE], "x", "no_such_lora", "There is /x/d or /y/a.safetensors."),
    ],
)
def test_who_is_not(given: list[tuple[str, str]], said: str, fault: str, hint: str) -> None:
    (found,) = misdirected([at(*one) for one in given], [AlphaSpec(8.0, said)], "--alpha")
    assert (found.kind, found.hint) == (fault, hint)


def test_one_named_counts_before_one_for_all() -> None:
    found = option_of_each([at(*FOLDER), at(*FILE)], [AlphaSpec(1.0), AlphaSpec(2.0, "d")])
    assert {source: option.alpha for source, option in found.items()} == {
        "/x/d": 2.0,
        "/y/a.safetensors": 1.0,
    }


@pytest.mark.parametrize(("source", "whose"), [(None, "all LoRAs"), ("d", "d")])
def test_one_that_is_given_twice(source: str | None, whose: str) -> None:
    options = [AlphaSpec(1.0, source), AlphaSpec(2.0, source)]
    (found,) = misdirected([at(*FOLDER)], options, "--alpha")
    assert (found.kind, found.message) == ("repeated", f"--alpha is given twice for {whose}")


def test_a_layout_that_a_spec_has_stays_where_no_option_says_another() -> None:
    locations = [at(*FOLDER, "native"), at(*FILE, "native")]
    found = in_layouts(locations, [LayoutSpec("diffusers", "d")])
    assert [one.spec.layout for one in found] == ["diffusers", "native"]


@pytest.mark.parametrize(("option", "value"), [("alphas", "8"), ("lora_layouts", "native")])
@pytest.mark.parametrize(
    ("said", "refused"),
    [("d", None), ("adapter_model.safetensors", None), ("e", "no_such_lora"), ("x.safetensors", "ambiguous")],
)
def test_both_options_mean_the_same(
    tmp_path: Path, option: str, value: str, said: str, refused: str | None
) -> None:
    base = save(tmp_path / "base.safetensors", {"a.weight": torch.ones(4, 4)})
    one = pair("a", torch.ones(4, 2), torch.ones(2, 4))
    peft = {"a.lora_B.weight": torch.ones(4, 2), "a.lora_A.weight": torch.ones(2, 4)}
    folder = save(tmp_path / "d" / "adapter_model.safetensors", peft).parent
    save_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 2})
    loras: list[Any] = [folder, *(save(tmp_path / name / "x.safetensors", one) for name in "pq")]
    options: dict[str, Any] = {option: [f"{said}={value}"]}
    kinds: set[str] = set()
    try:
        plan(base, loras, **options)
    except Refused as error:
        kinds = {fault.kind for fault in error.faults}
    assert kinds & {"no_such_lora", "ambiguous"} == ({refused} if refused else set())
