"""IA3: a weight times one number for each of its outputs or inputs.

Infused adapters (Liu et al., 2022). PEFT saves ``ia3_l``, (out, 1) or of feed-forward layers (1, in), of a
convolution (1, channels, 1 ...), and means W * l; the numbers of outputs scale a bias as well. LyCORIS saves
``weight`` beside ``on_input``, and means W * (1 + weight), a bias left as it is.
"""

from __future__ import annotations

import math

from fuselora.kinds.kind import BadParts, Kind, Shape, Shapes, Suffix, need, never
from fuselora.kinds.settings import Settings


def peft_shape(shapes: Shapes, base: Shape) -> Shape:
    """The base's own; ``ia3_l`` has as many dimensions, one of them not 1, of a convolution the second."""
    found = shapes["ia3_l"]
    many = sum(n != 1 for n in found) > 1 or (len(base) > 2 and found[:1] != (1,))
    if base and (len(base) < 2 or len(found) != len(base) or many):
        raise _unfit("ia3_l", found, base)
    return base


def ask_axis(settings: Settings, shapes: Shapes, base: Shape) -> None:
    """A convolution's numbers look alike for inputs and outputs."""
    found, (n_out, n_in) = shapes["ia3_l"], base[:2]
    if len(found) == 2:
        fitting = found in ((n_out, 1), (1, n_in))
    else:
        if settings.feedforward is None and n_out == n_in == found[1]:
            text = f"ia3_l {list(found)} may be of the inputs or of the outputs of {list(base)}"
            missing = "the feedforward_modules of its adapter_config.json, which tell, are not there"
            raise BadParts(f"{text}; {missing}", "unsupported")
        fitting = found[1] in {None: (n_out, n_in), False: (n_out,), True: (n_in,)}[settings.feedforward]
    if not fitting:
        raise _unfit("ia3_l", found, base)


def of_inputs(settings: Settings, shape: Shape, n_out: int) -> bool:
    """Whether an ``ia3_l`` that fits a weight scales its inputs."""
    if len(shape) == 2:
        return shape != (n_out, 1)
    return shape[1] != n_out if settings.feedforward is None else settings.feedforward


def scales_bias(settings: Settings, shapes: Shapes, base: Shape) -> bool:
    """Numbers of outputs do."""
    found, n_out = shapes["ia3_l"], math.prod(base)
    return math.prod(found) == n_out and not (len(found) > 1 and of_inputs(settings, found, n_out))


def lycoris_shape(shapes: Shapes, base: Shape) -> Shape:
    """The base's own; ``weight`` is (channels) of a linear layer, else (1, channels, 1 ...)."""
    if base and shapes["weight"] not in {_laid_out(n, base) for n in base[:2]}:
        raise _unfit("weight", shapes["weight"], base)
    return base


def ask_inputs(settings: Settings, shapes: Shapes, base: Shape) -> None:
    """``on_input`` is 0 or 1, and says which channels."""
    if settings.on_input is not None and shapes["weight"] != _laid_out(base[settings.on_input], base):
        channels = "inputs" if settings.on_input else "outputs"
        raise BadParts(f"weight {list(shapes['weight'])} is not one number for each of the {channels}")


def _unfit(part: str, shape: Shape, base: Shape) -> BadParts:
    return BadParts(f"{part} {list(shape)} is not one number for each input or output of {list(base)}")


def _laid_out(n_channels: int, base: Shape) -> Shape:
    return (n_channels,) if len(base) == 2 else (1, n_channels, *[1] * (len(base) - 2))


def bias_shape(shapes: Shapes, base: Shape) -> Shape:
    """The bias's own."""
    del shapes
    return base


IA3 = Kind(
    name="ia3",
    counted="ia3",
    suffixes=(Suffix("IA3", "on_input", r"\.on_input"),),
    needs=(need("on_input"), need("weight")),
    leaves=(".weight",),
    shape=lycoris_shape,
    is_nothing=lambda zero: "weight" in zero,
    moves=True,
    told_by="on_input",
    asks=ask_inputs,
)
PEFT_IA3 = Kind(
    name="peft_ia3",
    counted="ia3",
    suffixes=(Suffix("IA3", "ia3_l", r"\.ia3_l(?:\.(?P<name>.+))?"),),
    needs=(need("ia3_l"),),
    leaves=(".weight",),
    shape=peft_shape,
    is_nothing=never,
    moves=True,
    asks=ask_axis,
)
PEFT_IA3_B = Kind(
    name="peft_ia3_b",
    counted="ia3_b",
    suffixes=(),
    needs=(need("ia3_l"),),
    leaves=(".bias",),
    shape=bias_shape,
    is_nothing=never,
    moves=True,
    applies=scales_bias,
    if_there=True,
)
