"""LoRAs for Qwen-Image in every spelling of names: which the engine fuses, and which it drops in silence.

fuselora has no data for this family: names that agree are enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle import definition
from tests.small import lora, noise
from tests.vllm_omni.bases import QWEN_LINEARS, write_qwen
from tests.vllm_omni.comparison import Comparison, compare

RANK, ALPHA = 8, 4.0
KOHYA, PEFT = ("lora_down", "lora_up"), ("lora_A", "lora_B")


@dataclass(frozen=True)
class Style:
    """How a file spells a module, and whether the engine fuses it."""

    prefix: str
    factors: tuple[str, str]
    alpha: bool
    fused: bool
    flat: bool = False


STYLES = {
    "lora_down/up and alpha, as Lightning's": Style("", KOHYA, alpha=True, fused=True),
    "lora_down/up without alpha": Style("", KOHYA, alpha=False, fused=False),
    "kohya's flat names": Style("lora_unet_", KOHYA, alpha=True, fused=True, flat=True),
    "lora_A/B behind transformer": Style("transformer.", PEFT, alpha=False, fused=True),
    "lora_A/B and alpha behind transformer": Style("transformer.", PEFT, alpha=True, fused=False),
    "lora_A/B without a prefix": Style("", PEFT, alpha=False, fused=False),
    "lora_A/B and alpha without a prefix": Style("", PEFT, alpha=True, fused=True),
    "lora_A/B behind diffusion_model": Style("diffusion_model.", PEFT, alpha=False, fused=True),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen") / "base")


def fused_by_both(base: Path, folder: Path, style: Style, modules: Iterable[str]) -> Comparison:
    file = lora(folder / "lora.safetensors", *(factors(module, style) for module in modules))
    deltas = definition.deltas(load_file(file), None, [f"{module}.weight" for module in QWEN_LINEARS])
    assert deltas.keys() == {f"{module}.weight" for module in modules}
    found = compare(base, file, folder / "out", deltas)
    found.assert_ours()
    return found


def factors(module: str, style: Style) -> dict[str, torch.Tensor]:
    out_dim, in_dim = QWEN_LINEARS[module]
    name = style.prefix + (module.replace(".", "_") if style.flat else module)
    down, up = style.factors
    found = {
        f"{name}.{down}.weight": noise(RANK, in_dim, std=0.2, seed=hash_of(module)),
        f"{name}.{up}.weight": noise(out_dim, RANK, std=0.05, seed=hash_of(module) + 1),
    }
    return found | {f"{name}.alpha": torch.tensor(ALPHA)} if style.alpha else found


def hash_of(module: str) -> int:
    return 2 * list(QWEN_LINEARS).index(module)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_names(base: Path, tmp_path: Path, style: Style) -> None:
    found = fused_by_both(base, tmp_path, style, QWEN_LINEARS)
    assert len(found.deltas) == 28
    assert found.fused == (found.deltas.keys() if style.fused else set())
    found.assert_theirs(found.fused)
    assert found.says_fused


@pytest.mark.parametrize("stacked", ["to_{}", "add_{}_proj"])
def test_two_of_q_k_and_v(base: Path, tmp_path: Path, stacked: str) -> None:
    """The engine stacks the three in one parameter, and fuses a LoRA of all three or none."""
    two = [f"transformer_blocks.0.attn.{stacked.format(part)}" for part in "qv"]
    other = "transformer_blocks.1.attn.to_add_out"
    found = fused_by_both(base, tmp_path, STYLES["lora_A/B behind transformer"], [*two, other])
    assert found.fused == {f"{other}.weight"}
    found.assert_theirs(found.fused)
