"""What every kind of delta says of itself, from names and shapes alone. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from fuselora.kinds.settings import Settings

Part = str  # "down", "up", "alpha", "diff", "hada_w1_a" ...
Shape = tuple[int, ...]
Shapes = Mapping[Part, Shape]
# parts that make a moving kind of any that takes them (DoRA), as PEFT and as LyCORIS spell them
MAGNITUDES: frozenset[Part] = frozenset({"magnitude", "dora_scale"})
# parts that say what a delta is multiplied by
ALPHAS: frozenset[Part] = frozenset({"alpha", "alpha_scale"})


class BadParts(ValueError):
    """Parts that make no delta, or none for this base; ``code`` is the fault's kind."""

    def __init__(self, text: str, code: str = "shape") -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Suffix:
    """One spelling of a part: what follows the module's name in a key, as a regular expression.

    ``<name>`` catches the adapter name that PEFT puts into keys.
    """

    dialect: str
    part: Part
    pattern: str


def no_rank(shapes: Shapes) -> int | None:
    """For kinds that no alpha scales."""
    del shapes
    return None


def all_elements(shapes: Shapes) -> int:
    """For kinds whose parts are in memory while their tensor is computed."""
    return sum(math.prod(shape) for shape in shapes.values())


def no_elements(shapes: Shapes) -> int:
    """For kinds that are read row by row."""
    del shapes
    return 0


def any_zero(zero: frozenset[Part]) -> bool:
    """For products: one factor of zeros makes all of it zero."""
    return bool(zero)


def never(zero: frozenset[Part]) -> bool:
    """For kinds whose parts change the tensor even where they are zero."""
    del zero
    return False


def everywhere(settings: Settings, shapes: Shapes, base: Shape) -> bool:
    """For kinds whose every delta changes the tensor that it fits."""
    del settings, shapes, base
    return True


def asks_nothing(settings: Settings, shapes: Shapes, base: Shape) -> None:
    """For kinds that their parts' shapes say all about."""
    del settings, shapes, base


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to change a tensor.

    ``counted``: what fused.json and --json call the number of its deltas.
    ``needs``: for each factor, the sets of parts that give it, of which exactly one must be there.
    ``optional``: parts that may be there beside those.
    ``leaves``: the changed tensor is called as the module, and one of these.
    ``shape``: of the delta, from the parts' shapes and the base tensor's, which is () where only the LoRA is
    looked at: a kind that cannot do without it gives () or raises ``BadParts``, as for parts that do not fit.
    ``rank``: what alpha is divided by, from all parts of the module; None where no alpha counts.
    ``held``: elements in memory while the tensor is computed.
    ``is_nothing``: whether the tensor stays as it is when all values of these parts are zero.
    ``moves``: the arithmetic gives the changed tensor, not a difference from the base's.
    ``mixes_rows``: a row of the result needs other rows of the base.
    ``copies``: of the whole tensor that are in memory while it is computed.
    ``takes_alpha``: a stored alpha is not divided by a rank but means something else.
    ``outputs_last``: the layer's outputs are the base's columns, as of an embedding.
    ``told_by``: the part that shows the kind, where its others are other kinds' as well.
    ``not_with``: parts that show that another kind is meant.
    ``applies``: whether parts of these shapes change a tensor of this one at all.
    ``if_there``: a base without such a tensor needs none of it.
    ``asks``: raises ``BadParts`` when the settings do not say what the parts leave open.
    """

    name: str
    counted: str
    suffixes: tuple[Suffix, ...]
    needs: tuple[tuple[frozenset[Part], ...], ...]
    leaves: tuple[str, ...]
    shape: Callable[[Shapes, Shape], Shape]
    optional: frozenset[Part] = frozenset()
    rank: Callable[[Shapes], int | None] = no_rank
    held: Callable[[Shapes], int] = all_elements
    is_nothing: Callable[[frozenset[Part]], bool] = any_zero
    moves: bool = False
    mixes_rows: bool = False
    copies: int = 0
    takes_alpha: bool = False
    outputs_last: bool = False
    told_by: Part = ""
    not_with: frozenset[Part] = frozenset()
    applies: Callable[[Settings, Shapes, Shape], bool] = everywhere
    if_there: bool = False
    asks: Callable[[Settings, Shapes, Shape], None] = asks_nothing

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """Those that no other kind has, in the order of ``needs``."""
        return tuple(dict.fromkeys(p for ways in self.needs for way in ways for p in sorted(way)))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its own, then the optional ones, which other kinds may have as well."""
        return (*self.own_parts, *sorted(self.optional - set(self.own_parts)))

    @property
    def scaled(self) -> bool:
        """Whether alpha / rank counts, beside the strength."""
        return self.rank is not no_rank

    @property
    def replaces(self) -> bool:
        """Whether its part takes the tensor's place, so that nothing of the base's values counts."""
        return self.counted == "replace"

    @property
    def uses_alpha(self) -> bool:
        """Whether an alpha in its module has a meaning."""
        return self.scaled or self.takes_alpha

    @property
    def home(self) -> str:
        """What the base must have: a weight, a bias, a modulation."""
        return self.leaves[0].removeprefix(".")

    def is_in(self, parts: Collection[Part]) -> bool:
        """Whether a module has any of its own parts."""
        if self.told_by:
            return self.told_by in parts
        return self.not_with.isdisjoint(parts) and any(part in parts for part in self.own_parts)

    def moves_with(self, parts: Collection[Part]) -> bool:
        """Whether the arithmetic on these parts gives the changed tensor."""
        return self.moves or not MAGNITUDES.isdisjoint(parts)

    def lacks(self, parts: Mapping[Part, object]) -> Part | None:
        """A part that is missing, or None when the kind is whole."""
        for ways in self.needs:
            if not any(way <= parts.keys() for way in ways):
                begun = max(ways, key=lambda way: len(way & parts.keys()))
                return min(begun - parts.keys())
        return None

    def excess(self, parts: Mapping[Part, object]) -> tuple[Part, ...]:
        """Parts that say a factor a second time."""
        for ways in self.needs:
            whole = [way for way in ways if way <= parts.keys()]
            if len(whole) > 1:
                return tuple(sorted(frozenset().union(*whole)))
        return ()


def need(*ways: str) -> tuple[frozenset[Part], ...]:
    """Ways to give one factor, each as names of parts with blanks between."""
    return tuple(frozenset(way.split()) for way in ways)


def same(part: Part) -> Callable[[Shapes, Shape], Shape]:
    """The shape of a part that has its tensor's own."""
    return lambda shapes, base: shapes[part]


def has_kernel(shape: Shape) -> bool:
    """Whether it is a convolution's of more than one place."""
    return any(n != 1 for n in shape[2:])


def fits(delta: Shape, base: Shape) -> bool:
    """Equal, but for ones behind the second dimension: a 1 x 1 convolution is a linear layer."""
    return delta == base or (min(len(delta), len(base)) >= 2 and _bare(delta) == _bare(base))


def _bare(shape: Shape) -> Shape:
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
