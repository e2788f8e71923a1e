"""What a LoRA for Wan means, written out by hand in float64: every tensor of the file gives one delta.

Nothing here is shared with the package: the safetensors library reads, torch multiplies, and names
are carried into diffusers' layout by diffusers' own converter for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]

PAIRS = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
)
DIFFS = {".diff": ".weight", ".diff_b": ".bias", ".diff_m": ".modulation"}
# of a whole checkpoint; diffusers has no types for it
CONVERT: Callable[[Tensors], Tensors] = convert_wan_transformer_to_diffusers
PREFIXES = ("diffusion_model.", "transformer.", "base_model.model.")
KOHYA = "lora_unet_"


def weights(folder: Path) -> Tensors:
    """Every tensor of the safetensors files that lie in ``folder`` itself."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        read = load_file(path)
        assert found.keys().isdisjoint(read)
        found |= read
    return found


def in_diffusers_names(native: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors of a checkpoint in Wan's own names, in diffusers' ones."""
    converted = CONVERT(dict(native))
    assert len(converted) == len(native)
    return converted


def deltas(lora: Mapping[str, torch.Tensor], alpha: float | None, native: Iterable[str]) -> Tensors:
    """The file's deltas at strength 1 in float64, by the file's own spelling of the base's names.

    ``alpha`` is that of pairs without an alpha tensor; None is the rank. ``native`` are the base's
    names in Wan's own layout, which flattened names are looked up among.
    """
    flat = {name.removesuffix(".weight").replace(".", "_"): name.removesuffix(".weight") for name in native}
    found: Tensors = {}
    used: list[str] = []
    for keys, module, leaf, delta in _all_deltas(lora, alpha):
        name = flat[module.removeprefix(KOHYA)] if module.startswith(KOHYA) else _without_prefix(module)
        assert name + leaf not in found
        found[name + leaf] = delta
        used += keys
    assert sorted(used) == sorted(lora), "a tensor of the file was not read, or read twice"
    return found


def _all_deltas(
    lora: Mapping[str, torch.Tensor], alpha: float | None
) -> Iterator[tuple[list[str], str, str, torch.Tensor]]:
    """(keys read, module as spelled, leaf of the base tensor, delta) of each pair and difference."""
    for key, tensor in lora.items():
        for down, up in PAIRS:
            if key.endswith(down):
                module = key.removesuffix(down)
                yield _pair(lora, module, (key, module + up), alpha)
        for part, leaf in DIFFS.items():
            if key.endswith(part):
                yield [key], key.removesuffix(part), leaf, tensor.double()


def _pair(
    lora: Mapping[str, torch.Tensor], module: str, keys: tuple[str, str], alpha: float | None
) -> tuple[list[str], str, str, torch.Tensor]:
    down, up = (lora[key].double() for key in keys)
    rank = down.shape[0]
    stored = lora.get(f"{module}.alpha")
    value = rank if alpha is None else alpha
    scale = (value if stored is None else stored.item()) / rank
    read = [*keys] if stored is None else [*keys, f"{module}.alpha"]
    return read, module, ".weight", scale * (up @ down)


def _without_prefix(module: str) -> str:
    for prefix in PREFIXES:
        if module.startswith(prefix):
            return module.removeprefix(prefix)
    return module
