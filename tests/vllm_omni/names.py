"""vLLM-Omni's names of Wan's and Qwen-Image's parameters, in those of a diffusers checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

STACKED = {
    ".to_qkv.": (".to_q.", ".to_k.", ".to_v."),
    ".add_kv_proj.": (".add_q_proj.", ".add_k_proj.", ".add_v_proj."),
}
RENAMED = {
    ".net_0.": ".net.0.",
    ".net_2.": ".net.2.",
    ".to_out.": ".to_out.0.",
    "output_scale_shift_prepare.": "",
}


def in_checkpoint_names(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of one transformer as the checkpoint holds them: q, k and v apart."""
    found: dict[str, torch.Tensor] = {}
    for name, value in held.items():
        parts = next((parts for stacked, parts in STACKED.items() if stacked in name), None)
        if parts is None:
            found[_renamed(name)] = value
            continue
        stacked = next(stacked for stacked in STACKED if stacked in name)
        rows = value.chunk(len(parts))
        found |= {name.replace(stacked, part): row for part, row in zip(parts, rows, strict=True)}
    return found


def _renamed(name: str) -> str:
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name
