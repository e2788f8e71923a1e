"""DoRA: a trained magnitude m beside a difference: W' = m * V / |V|, with V = W + alpha / rank * difference.

Weight-decomposed low-rank adaptation (Liu et al., 2024). PEFT saves ``lora_magnitude_vector``, one number for
each output, and takes the norm as it is. LyCORIS and kohya's trainers save ``dora_scale``, (out, 1 ...) or
(1, in, 1 ...), and add the epsilon of float32 to the norm.
"""

from __future__ import annotations

import math
from typing import Literal

from fuselora.kinds.kind import MAGNITUDES, BadParts, Kind, Part, Shape, Shapes

# what the norms are of
Axis = Literal["rows", "columns"]
EPSILON = 2.0**-23
SPELLED = {"magnitude": "lora_magnitude_vector", "dora_scale": "dora_scale"}


def magnitude_of(parts: Shapes) -> Part | None:
    """The spelling that is there, if any."""
    return next((part for part in sorted(MAGNITUDES) if part in parts), None)


def check_magnitude(kind: Kind, shapes: Shapes, base: Shape) -> None:
    """Raises ``BadParts`` when a magnitude does not fit the base, or fits it in two ways."""
    found = sorted(kind.optional & MAGNITUDES & shapes.keys())
    if len(found) > 1:
        raise BadParts(f"the magnitude is there twice, as {' and '.join(SPELLED[part] for part in found)}")
    if found and len(base) >= 2:
        _check(found[0], kind, shapes[found[0]], base)


def axis_of(part: Part, shape: Shape, n_rows: int, outputs_last: bool) -> Axis:
    """What a magnitude that fits is multiplied with; ``outputs_last`` as the kind says."""
    if part == "magnitude":
        return "columns" if outputs_last else "rows"
    return "rows" if shape[0] == n_rows and math.prod(shape[1:]) == 1 else "columns"


def by_columns(kind: Kind, shapes: Shapes, base: Shape) -> bool:
    """Whether there is a magnitude of the columns, whose norms are over all rows."""
    part = magnitude_of(shapes)
    return part is not None and axis_of(part, shapes[part], base[0], kind.outputs_last) == "columns"


def _check(part: Part, kind: Kind, shape: Shape, base: Shape) -> None:
    n_out, n_in = base[:2]
    unfit = BadParts(
        f"{SPELLED[part]} {list(shape)} is not one number for each row or column of {list(base)}"
    )
    if not shape or sum(n != 1 for n in shape) > 1:
        raise unfit
    if part == "dora_scale" and len(shape) == 1 and n_out == n_in == shape[0]:
        raise BadParts(f"dora_scale {list(shape)} may be of the rows or of the columns of {list(base)}")
    axis = axis_of(part, shape, n_out, kind.outputs_last)
    laid_across = part != "dora_scale" or len(shape) == 1 or shape[0] == 1
    if math.prod(shape) != (n_out if axis == "rows" else n_in) or (axis == "columns" and not laid_across):
        raise unfit
