"""Matrices given as two factors, with a Tucker core between them or without."""

from __future__ import annotations

import math

from fuselora.kinds.kind import BadParts, Shape


def factored_shape(left: Shape, right: Shape, core: Shape | None = None) -> Shape:
    """Of (rows, rank) @ (rank, columns ...). Raises ``BadParts``.

    With a core (rank, rank, kernel ...) ``left`` is (rank, rows) and ``right`` (rank, columns).
    """
    if core is not None:
        return _cored_shape(left, right, core)
    if len(left) < 2 or len(right) < 2 or left[1] != right[0] or any(n != 1 for n in left[2:]):
        raise BadParts(f"factors of shapes {list(left)} and {list(right)} have no product")
    return (left[0], *right[1:])


def _cored_shape(left: Shape, right: Shape, core: Shape) -> Shape:
    if not len(left) == len(right) == 2 or core[:2] != (left[0], right[0]):
        shapes = f"{list(left)} and {list(right)} do not fit a core of shape {list(core)}"
        raise BadParts(f"factors of shapes {shapes}")
    return (left[1], right[1], *core[2:])


def unflattened(delta: Shape, base: Shape) -> Shape:
    """A matrix (out, in * kernel) in the base's shape (out, in, kernel ...), else as it is."""
    flat = len(delta) == 2 and math.prod(base[1:]) == delta[1]
    return (delta[0], *base[1:]) if flat else delta


def leading(shape: Shape) -> int | None:
    """The first dimension; None of a number, which is the shape's fault to tell."""
    return shape[0] if shape else None
