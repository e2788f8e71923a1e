"""Small safetensors files with any names, in any order, and their plans: no model family needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from fuselora import pipeline
from fuselora.header import TensorInfo, encode_header
from fuselora.tensors import TORCH_DTYPES
from fuselora.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fuselora.planning import FusePlan

CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()} | {
    torch.int64: "I64"
}
FORMAT: Mapping[str, str] = {"format": "pt"}


def noise(*shape: int, std: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Seeded normal values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(std).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes as a file holds them."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = FORMAT, *, pad: int = 0
) -> Path:
    """A file whose tensors stand in the order given, aligned or not, its data at ``pad`` modulo 4096."""
    infos, at = [], 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        infos.append(TensorInfo(name, CODES[tensor.dtype], tuple(tensor.shape), at, end))
        at = end
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(encode_header(infos, metadata, congruent_to=pad))
        stream.writelines(raw(tensor) for tensor in tensors.values())
    return path


def pair(
    module: str, up: torch.Tensor, down: torch.Tensor, alpha: float | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of one LoRA module."""
    tensors = {f"{module}.lora_up.weight": up, f"{module}.lora_down.weight": down}
    return tensors if alpha is None else {**tensors, f"{module}.alpha": torch.tensor(alpha)}


def lora(path: Path, *modules: Mapping[str, torch.Tensor]) -> Path:
    """A LoRA file of the tensors given."""
    save_file({name: tensor for module in modules for name, tensor in module.items()}, path)
    return path


def planned(
    base: Path, loras: Iterable[Path | str], out: Path | None = None, *, content: bool = True, **options: Any
) -> FusePlan:
    """The plan of a merge, the LoRA data read."""
    return pipeline.plan(base, [str(one) for one in loras], out, content=content, **options)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under a folder by relative name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def verified_merge(base: Path, lora: Path, out: Path, strength: str = "", **options: Any) -> None:
    """Merges, and has ``verify`` find nothing wrong with the result."""
    pipeline.merge(base, [f"{lora}{strength}"], out, **options)
    found = verify(out, base=base, loras=[lora])
    assert found.ok, found.findings
