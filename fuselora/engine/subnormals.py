"""What the CPU's bfloat16 instructions take for zero: anything smaller than 2^-126, on the way too."""

from __future__ import annotations

import math

import torch

# 2^20 times what is lost with a value: beside numbers of this size the loss is within the promised bound
ENOUGH = 2.0**-106
MAGNITUDE = 0x7FFF  # of bfloat16's bits, all but the sign


def smallest(values: torch.Tensor) -> float:
    """The least magnitude in a bfloat16 tensor that is not zero; infinity where there is none."""
    if values.numel() == 0:
        return math.inf
    bits = (values.view(torch.int16) - 1).bitwise_and_(MAGNITUDE)  # zeros of both signs become the largest
    least = int(bits.min()) + 1
    if least > MAGNITUDE:
        return math.inf
    return torch.tensor(least, dtype=torch.int16).view(torch.bfloat16).item()


def is_pair_sound(up: torch.Tensor, down: torch.Tensor, scale: float) -> bool:
    """Whether the product of two bfloat16 factors loses nothing that counts beside itself.

    Each product that is not zero is large enough to stand for what all sums over the rank may lose.
    """
    return smallest(up) * smallest(down) * min(1.0, abs(scale)) >= up.shape[1] * ENOUGH


def is_base_sound(base: torch.Tensor) -> bool:
    """Whether no element of a bfloat16 matrix is so small that it, or a sum with it, could be lost."""
    return smallest(base) >= ENOUGH
