"""A base of no known family: names that agree up to prefix, flattening and adapter name, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.errors import Refused
from fuselora.pipeline import plan
from fuselora.specs import LayoutSpec
from fuselora.verify import verify
from tests import small

if TYPE_CHECKING:
    from pathlib import Path

LINEAR, CONV, NORM = "stack.3.attn_all.to_mix.0", "stem_conv.deep", "out_norm"
RANK = 3
SHAPES = {
    f"{LINEAR}.weight": (10, 7),
    f"{CONV}.weight": (6, 4, 3, 3),
    f"{NORM}.weight": (5,),
    f"{NORM}.bias": (5,),
    "stack.3.attn.all_to_mix.weight": (10, 7),
}
PREFIXES = (
    "", "transformer.", "diffusion_model.", "model.diffusion_model.", "base_model.model.", "unet.",
    "base_model.model.transformer.",
)  # fmt: skip
# of a pair's down and up
PARTS = {
    "kohya": ("lora_down.weight", "lora_up.weight"),
    "peft": ("lora_A.weight", "lora_B.weight"),
    "peft default": ("lora_A.default.weight", "lora_B.default.weight"),
    "peft turbo.v1": ("lora_A.turbo.v1.weight", "lora_B.turbo.v1.weight"),
    "diffusers": ("lora.down.weight", "lora.up.weight"),
}


def base_at(path: Path, prefix: str = "") -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {prefix + name: small.noise(*shape, seed=n) for n, (name, shape) in enumerate(SHAPES.items())}
    return small.write(path, tensors), tensors


def lora_of(prefix: str, parts: str, *, alpha: float | None = None) -> dict[str, torch.Tensor]:
    """Pairs of the linear layer and the convolution, and both differences of a norm."""
    down, up = PARTS[parts]
    flat = prefix.endswith("_")

    def start(module: str) -> str:
        return prefix + (module.replace(".", "_") if flat else module)

    found = {
        f"{start(LINEAR)}.{down}": small.noise(RANK, 7, seed=20),
        f"{start(LINEAR)}.{up}": small.noise(10, RANK, seed=21),
        f"{start(CONV)}.{down}": small.noise(RANK, 4, 3, 3, seed=22),
        f"{start(CONV)}.{up}": small.noise(6, RANK, 1, 1, seed=23),
        f"{start(NORM)}.diff_b": small.noise(5, seed=24),
        f"{start(NORM)}.diff": small.noise(5, seed=25),
    }
    if alpha is not None:
        found |= {f"{start(module)}.alpha": torch.tensor(alpha) for module in (LINEAR, CONV)}
    return found


def wanted(
    base: dict[str, torch.Tensor], prefix: str, scale: float, strength: float
) -> dict[str, torch.Tensor]:
    """In float64; pairs take the scale, and all of it the strength."""
    (a, b, c, d, bias, norm) = (tensor.double() for tensor in lora_of("", "kohya").values())
    deltas = {
        f"{LINEAR}.weight": scale * b @ a,
        f"{CONV}.weight": scale * torch.einsum("or,rihw->oihw", d.flatten(1), c),
        f"{NORM}.bias": bias,
        f"{NORM}.weight": norm,
    }
    found = {name: tensor.double() for name, tensor in base.items()}
    for name, delta in deltas.items():
        found[prefix + name] += strength * delta
    return found


def check(out: Path, exact: dict[str, torch.Tensor]) -> None:
    got = load_file(out / "base.safetensors")
    assert got.keys() == exact.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor.double(), exact[name], rtol=2e-6, atol=2e-6, msg=name)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("prefix", [*PREFIXES, "lora_unet_", "lora_transformer_", "lycoris_"])
def test_names_up_to_prefix_flattening_and_adapter_name(tmp_path: Path, prefix: str, parts: str) -> None:
    base_path, base = base_at(tmp_path / "base.safetensors")
    path = small.write(tmp_path / "x.safetensors", lora_of(prefix, parts, alpha=1.5))
    report = fuselora.merge(base_path, [f"{path}:0.75"], out=tmp_path / "out")
    checkpoint = report.plan.checkpoint
    assert (checkpoint.family, checkpoint.layout) == (None, None)
    assert not report.notices
    check(tmp_path / "out", wanted(base, "", 0.5, 0.75))


@pytest.mark.parametrize(
    "base_prefix", ["model.diffusion_model.", "diffusion_model.", "transformer.", "net."]
)
@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "lora_unet_"])
def test_a_base_with_a_prefix_of_its_own(tmp_path: Path, base_prefix: str, prefix: str) -> None:
    base_path, base = base_at(tmp_path / "base.safetensors", base_prefix)
    path = small.write(tmp_path / "x.safetensors", lora_of(prefix, "peft"))
    fuselora.merge(base_path, [path], out=tmp_path / "out")
    check(tmp_path / "out", wanted(base, base_prefix, 1.0, 1.0))
    assert verify(tmp_path / "out", base=base_path, loras=[path]).ok


def test_a_flattened_name_that_two_tensors_have_is_refused(tmp_path: Path) -> None:
    """stack.3.attn_all.to_mix and stack.3.attn.all_to_mix are one once the dots are gone."""
    tensors = {f"stack.3.{name}.weight": small.noise(4, 4) for name in ("attn_all.to_mix", "attn.all_to_mix")}
    base = small.write(tmp_path / "base.safetensors", tensors)
    pair = small.pair("lora_unet_stack_3_attn_all_to_mix", small.noise(4, 2), small.noise(2, 4))
    with pytest.raises(Refused, match=r"could be stack\.3\.attn_all\.to_mix\.weight or stack\.3\.attn\.all"):
        plan(base, [small.write(tmp_path / "x.safetensors", pair)])


def test_names_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    base_path, _ = base_at(tmp_path / "base.safetensors")
    pair = small.pair("stack.3.attn_all.to_other.0", small.noise(10, 2), small.noise(2, 7))
    with pytest.raises(Refused, match="0 of 1 modules match"):
        plan(base_path, [small.write(tmp_path / "x.safetensors", pair)])


def test_there_is_no_layout_to_say(tmp_path: Path) -> None:
    base_path, _ = base_at(tmp_path / "base.safetensors")
    path = small.write(tmp_path / "x.safetensors", lora_of("", "peft"))
    with pytest.raises(Refused, match="native is no layout of a base of no known family"):
        plan(base_path, [path], lora_layouts=(LayoutSpec("native"),))
