"""Bases whose own shapes are none of their family's: the base is named, not the LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fuselora.errors import Refused
from fuselora.pipeline import plan
from fuselora.synth import write_safetensors
from tests.inputs import pair, tensor

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.errors import Fault
    from fuselora.synth import Spec

QKV = "double_blocks.0.img_attn.qkv"
ENDS = [tensor("img_in.weight", 4, 4), tensor("txt_in.weight", 4, 4)]
TO_V = "transformer_blocks.0.attn.to_v"
SPLIT = [
    tensor("x_embedder.weight", 4, 4),
    *(tensor(f"transformer_blocks.0.attn.to_{part}.weight", 4, 4) for part in "qk"),
    tensor(f"{TO_V}.weight", 4, 6),
]


def fault(folder: Path, base: list[Spec], lora: list[Spec]) -> Fault:
    write_safetensors(folder / "base.safetensors", base)
    write_safetensors(folder / "lora.safetensors", lora)
    with pytest.raises(Refused) as refused:
        plan(folder / "base.safetensors", [folder / "lora.safetensors"])
    (found,) = refused.value.faults
    return found


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("others", [[], pair("img_in")])
def test_a_part_of_a_fused_layer_that_has_no_equal_parts(
    tmp_path: Path, others: list[Spec], flat: bool
) -> None:
    module = f"lora_unet_{TO_V.replace('.', '_')}" if flat else TO_V
    found = fault(tmp_path, [*ENDS, tensor(f"{QKV}.weight", 13, 4)], [*pair(module), *others])
    assert found.kind == ("unmatched" if others else "no_match")
    assert f"the base's {QKV}.weight is [13, 4]: [13, 4] has no 3 equal parts" in found.message


def test_a_delta_of_the_right_size_for_a_base_of_the_wrong_one(tmp_path: Path) -> None:
    found = fault(tmp_path, [*ENDS, tensor(f"{QKV}.weight", 13, 4)], pair(QKV, 12, 4))
    assert found.kind == "shape"
    assert found.hint == "That is no shape of such a layer: [13, 4] has no 3 equal parts."


def test_a_base_of_such_a_shape_takes_what_is_of_that_shape(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "base.safetensors", [*ENDS, tensor(f"{QKV}.weight", 13, 4)])
    write_safetensors(tmp_path / "lora.safetensors", pair(QKV, 13, 4))
    planned = plan(tmp_path / "base.safetensors", [tmp_path / "lora.safetensors"])
    assert [step.base_key for step in planned.fused_steps] == [f"{QKV}.weight"]


def test_a_fused_layer_of_parts_that_do_not_go_together(tmp_path: Path) -> None:
    found = fault(tmp_path, SPLIT, pair(QKV, 12, 4))
    assert found.kind == "no_match"
    said = f"the base's tensors do not make one {QKV}: "
    assert said in found.message
    assert f"{TO_V}.weight [4, 6]" in found.message


def test_a_part_that_the_base_lacks_is_not_blamed_on_shapes(tmp_path: Path) -> None:
    found = fault(tmp_path, SPLIT[:-1], pair(QKV, 12, 4))
    assert found.kind == "no_match"
    assert "do not make one" not in found.message
