"""What one writes by hand: load_file, addmm, save_file. Alpha is the rank, as the bench makes its LoRAs."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from benchmark.peers import OUT_DTYPE, PREFIX, WEIGHTS, task


def main() -> None:
    """Fuse shard by shard."""
    asked = task()
    loras = [
        (load_file(path / WEIGHTS if path.is_dir() else path), strength) for path, strength in asked.loras
    ]
    for shard in sorted(asked.base.glob("*.safetensors")):
        tensors = load_file(shard)
        for name, weight in tensors.items():
            tensors[name] = fused(weight, name, loras, float32=asked.float32)
        save_file(tensors, asked.out / shard.name, metadata={"format": "pt"})
    asked.finish()


def fused(
    weight: torch.Tensor, name: str, loras: list[tuple[dict[str, torch.Tensor], float]], *, float32: bool
) -> torch.Tensor:
    """In the weight's dtype if the factors have the same, which on a CPU is one pass; else in ``float32``."""
    module = f"{PREFIX}.{name.removesuffix('.weight')}"
    for lora, strength in loras:
        up, down = lora.get(f"{module}.lora_B.weight"), lora.get(f"{module}.lora_A.weight")
        if up is None or down is None:
            continue
        if float32 or up.dtype != weight.dtype:
            weight = torch.addmm(weight.float(), up.float(), down.float(), alpha=strength)
        else:
            weight.addmm_(up, down, alpha=strength)
    return weight.to(OUT_DTYPE)


if __name__ == "__main__":
    main()
