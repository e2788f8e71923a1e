"""Whether stored values are all zero, of either sign. Standard library only."""

from __future__ import annotations

from fuselora.header import DTYPE_BITS

# In which the top bit of an element is a sign, and alone a zero; of the FNUZ formats it is NaN.
SIGNED = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
MINUS = 0x80


def all_zero(block: bytes, dtype: str) -> bool:
    """Of whole elements, little endian: a factor times 0 holds -0.0 where it was negative."""
    rest = len(block) - block.count(0)
    if rest == 0 or dtype not in SIGNED:
        return rest == 0
    size = DTYPE_BITS[dtype] // 8
    return block[size - 1 :: size].count(MINUS) == rest
