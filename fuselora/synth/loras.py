"""The tensors of a LoRA in any style, its metadata, and its file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from fuselora.synth.base import base_tensors, in_layout
from fuselora.synth.files import write_json, write_safetensors
from fuselora.synth.styles import NORMS_AND_BIASES, STYLES
from fuselora.synth.values import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from fuselora.synth.files import Fill
    from fuselora.synth.sizes import WanSize
    from fuselora.synth.styles import LoraStyle


def lora_tensors(
    size: WanSize,
    *,
    style: str = "comfy",
    rank: int = 4,
    alpha: float | None = None,
    dtype: str = "BF16",
    diffs: bool = False,
    prefix: str | None = None,
) -> tuple[Spec, ...]:
    """Every tensor of a LoRA for ``size`` in one of ``STYLES``; its deltas are a tenth of the weights.

    ``alpha`` None means the rank, stored or not as the style does. ``diffs`` adds differences of norms
    and biases to a style without them; ``prefix`` replaces the style's.
    """
    how = STYLES[style]
    how = replace(how, diffs=how.diffs | NORMS_AND_BIASES) if diffs else how
    how = how if prefix is None else replace(how, prefix=prefix)
    specs = (_lora_specs(base, how, rank, alpha, dtype) for base in base_tensors(size))
    return tuple(spec for group in specs for spec in group)


def _lora_specs(base: Spec, how: LoraStyle, rank: int, alpha: float | None, dtype: str) -> Iterator[Spec]:
    """The tensors that speak of one base tensor: a pair, a difference, or nothing."""
    kind = _kind(base)
    if kind == "linear" and re.match(how.targets, base.name):
        yield from _pair(base, how, min(rank, *base.shape) if how.capped else rank, alpha, dtype)
    elif kind in how.diffs:
        module = base.name.rpartition(".")[0]
        part = {"bias": "diff_b", "modulation": "diff_m"}.get(kind, "diff")
        name = f"{_spelled(module, how)}.{part}"
        yield Spec(name, dtype, base.shape, base.std / 10, key=f"{module}.{part}")


def _pair(base: Spec, how: LoraStyle, rank: int, alpha: float | None, dtype: str) -> Iterator[Spec]:
    out_dim, in_dim = base.shape
    module = base.name.removesuffix(".weight")
    name = _spelled(module, how)
    scale = 1.0 if alpha is None else alpha / rank
    up_std = 0.1 / (abs(scale or 1.0) * rank**0.5)
    yield Spec(f"{name}.{how.down}.weight", dtype, (rank, in_dim), base.std, key=f"{module}.down")
    yield Spec(f"{name}.{how.up}.weight", dtype, (out_dim, rank), up_std, key=f"{module}.up")
    if how.alpha == "always" or (how.alpha == "given" and alpha is not None):
        stored = float(rank if alpha is None else alpha)
        yield Spec(f"{name}.alpha", how.alpha_dtype or dtype, (), mean=stored)


def _kind(base: Spec) -> str:
    """What a native tensor is: ``bias``, ``modulation``, ``norm``, ``linear`` or ``conv``."""
    leaf = base.name.rpartition(".")[2]
    if leaf in ("bias", "modulation"):
        return leaf
    return {1: "norm", 2: "linear"}.get(len(base.shape), "conv")


def _spelled(module: str, how: LoraStyle) -> str:
    name = in_layout(module, how.layout)
    return how.prefix + (name.replace(".", "_") if how.flat else name)


def write_lora(
    path: Path,
    size: WanSize,
    *,
    style: str = "comfy",
    rank: int = 4,
    alpha: float | None = None,
    dtype: str = "BF16",
    diffs: bool = False,
    prefix: str | None = None,
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
    fill: Fill = "noise",
) -> Path:
    """A LoRA file; in style ``adapter`` a folder of ``adapter_model.safetensors`` and its config.

    ``metadata`` is added to the style's own; the rest as in ``lora_tensors``.
    """
    how = STYLES[style] if prefix is None else replace(STYLES[style], prefix=prefix)
    said = float(rank) if alpha is None else alpha
    specs = lora_tensors(size, style=style, rank=rank, alpha=alpha, dtype=dtype, diffs=diffs, prefix=prefix)
    header = _lora_metadata(size, how, rank, said) | dict(metadata or {})
    if how.alpha != "config":
        return write_safetensors(path, specs, seed=seed, metadata=header, fill=fill)
    path.mkdir(parents=True, exist_ok=True)
    write_safetensors(path / "adapter_model.safetensors", specs, seed=seed, metadata=header, fill=fill)
    write_json(path / "adapter_config.json", _peft_config(size, how, rank, said))
    return path


def _lora_metadata(size: WanSize, how: LoraStyle, rank: int, alpha: float) -> dict[str, str]:
    found = {key: text.format(rank=rank, alpha=float(alpha)) for key, text in how.metadata.items()}
    if how.alpha == "header":
        entries = {how.prefix + key: value for key, value in _peft_config(size, how, rank, alpha).items()}
        found["lora_adapter_metadata"] = json.dumps(entries, indent=2, sort_keys=True)
    return found


def _peft_config(size: WanSize, how: LoraStyle, rank: int, alpha: float) -> dict[str, object]:
    linears = [base.name for base in base_tensors(size.with_blocks(1)) if _kind(base) == "linear"]
    targets = {
        in_layout(name.removesuffix(".weight"), how.layout).split(".", 2)[2]
        for name in linears
        if re.match(how.targets, name)
    }
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_bias": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
