"""A component's tensors by every name they go by, in each layout of its family. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from fuselora.families.pattern import LEAVES, split_leaf
from fuselora.families.runs import Run, Runs, inverse, joined, through
from fuselora.text_encoders import CONNECTOR_NAMES, CONNECTORS

if TYPE_CHECKING:
    from fuselora.checkpoint import Component
    from fuselora.families import Family, Layout
    from fuselora.families.family import LayoutTensor
    from fuselora.families.pattern import Shapes
    from fuselora.lora.grammar import Spelling

Shape = tuple[int, ...]
# transformers has had CLIPTextModel with and without text_model, Qwen with and without language_model
LEVELS = re.compile(r"^(?:(?:text_model|language_model|model)[._])+")
NORM_LEAVES = {"scale": "weight", "weight": "scale"}
OWN = "own"  # the layout of a base whose family or layout is not known


@dataclass(frozen=True, slots=True)
class Place:
    """A base tensor, and its rows that a tensor of some name is: all of them in order where none are given.

    A run leads from the base's rows to those of the tensor so called.
    """

    base_key: str
    rows: Runs = ()


@dataclass(frozen=True, slots=True)
class Home:
    """What a name means: one base tensor, or parts of one or of several. ``shape`` is that of the name's."""

    places: tuple[Place, ...]
    shape: Shape

    def __str__(self) -> str:
        return " and ".join(place.base_key for place in self.places)


Homes = Mapping[str, Home]
FlatHomes = Mapping[str, tuple[Home, ...]]


@dataclass(frozen=True)  # without slots, so that what is derived stays
class NameTable:
    """Names -> homes by layout, dotted and, once they are asked for, flattened.

    ``levels``: whether the names are a text encoder's, which some versions have with more levels.
    ``pieces``: what the base has of a known family.
    """

    dotted: Mapping[Layout, Homes]
    levels: bool = False
    pieces: Pieces | None = None

    @cached_property
    def flat(self) -> Mapping[Layout, FlatHomes]:
        return {layout: _by(_flat_name, homes) for layout, homes in self.dotted.items()}

    @cached_property
    def bare(self) -> FlatHomes:
        """By the names without those levels."""
        return _by(without_levels, self.dotted[OWN]) if self.levels else {}

    @cached_property
    def flat_bare(self) -> FlatHomes:
        return _by(lambda name: _flat_name(without_levels(name)), self.dotted[OWN]) if self.levels else {}

    def find(self, reading: Spelling, leaf: str) -> dict[Layout, tuple[Home, ...]]:
        """What is called this, by the layouts that call it so."""
        name = (flatten(reading.name) if reading.flat else reading.name) + leaf
        found, other = self._called(name, flat=reading.flat), _of_norm(name)
        if found or other is None:
            return found
        norms = self._called(other, flat=reading.flat)
        return {layout: homes for layout, homes in norms.items() if all(len(h.shape) == 1 for h in homes)}

    def _called(self, name: str, *, flat: bool) -> dict[Layout, tuple[Home, ...]]:
        if flat:
            return {layout: homes[name] for layout, homes in self.flat.items() if name in homes}
        return {layout: (homes[name],) for layout, homes in self.dotted.items() if name in homes}

    def unfit(self, reading: Spelling, leaf: str) -> str | None:
        """What is wrong with the base's own tensors for one of this name to be found in them."""
        return self.pieces.unfit_for(reading, leaf) if self.pieces else None

    def find_bare(self, reading: Spelling, leaf: str) -> tuple[Home, ...]:
        """What is called this but for levels that only one of the two has."""
        name = without_levels(reading.name)
        if reading.flat:
            return self.flat_bare.get(flatten(name) + leaf, ())
        return self.bare.get(name + leaf, ())


def name_table(component: Component, family: Family | None, layout: Layout | None) -> NameTable:
    """All names of a component's tensors: its own, and those of the family's other layouts."""
    shapes = component.model_shapes()
    own = {name: Home((Place(component.prefix + name),), shape) for name, shape in shapes.items()}
    own |= _beside(component, family)
    if component.name == CONNECTORS:
        own |= _by_other_names(own)
    if component.is_text_encoder:
        return NameTable({OWN: own}, levels=True)
    if family is None or layout is None:
        return NameTable({OWN: own})
    pieces = Pieces.of(component, family, layout)
    dotted: dict[Layout, Homes] = {layout: own}
    for other in family.all_layouts:
        if other != layout:
            dotted[other] = {s.name: pieces.home(s) for s in family.spellings(pieces.shapes, other)}
    return NameTable(dotted, pieces=pieces)


def _beside(component: Component, family: Family | None) -> Homes:
    """What the family's single files hold beside the model, by whole names."""
    tensors = component.tensors().items() if family and family.beside and component.prefix else ()
    known = family.beside if family else frozenset[str]()
    return {n: Home((Place(n),), t.shape) for n, t in tensors if split_leaf(n)[0] in known}


def _of_norm(name: str) -> str | None:
    """What else a norm's weight is called: scale by its author and older versions of ComfyUI."""
    stem, dot, leaf = name.rpartition(".")
    return f"{stem}.{NORM_LEAVES[leaf]}" if dot and "norm" in stem and leaf in NORM_LEAVES else None


def _by_other_names(own: Homes) -> Homes:
    """What LTX-2's connectors have, by Lightricks' names."""
    named = product(CONNECTOR_NAMES.items(), LEAVES)
    pairs = ((f"{theirs}.{leaf}", f"{ours}.{leaf}") for (theirs, ours), leaf in named)
    return {theirs: own[ours] for theirs, ours in pairs if ours in own}


def without_levels(name: str) -> str:
    """A text encoder's name without the levels that some versions of its class have around the model."""
    return LEVELS.sub("", name)


def flatten(name: str) -> str:
    """As kohya's trainers spell a module."""
    return name.replace(".", "_")


@dataclass(frozen=True, slots=True)
class Pieces:
    """The canonical tensors that a base has, and where: a base key, and the runs that lead to it if any.

    ``odd``: by base key, what is wrong with the shape of a tensor; ``uneven``: by canonical names, the same
    of the tensor that should hold it.
    """

    family: Family
    base: Shapes
    shapes: Shapes
    places: Mapping[str, tuple[str, Runs]]
    odd: Mapping[str, str]
    uneven: Mapping[str, str]

    @classmethod
    def of(cls, component: Component, family: Family, layout: Layout) -> Pieces:
        held, shapes, places = component.model_shapes(), {}, {}
        odd: dict[str, str] = {}
        uneven: dict[str, str] = {}
        for name in held:
            base_key = component.prefix + name
            try:
                pieces = family.pieces(name, held, layout)
            except ValueError as error:  # no shape of the layout: known by its own name alone
                odd[base_key] = str(error)
                wrong = f"the base's {base_key} is {list(held[name])}: {error}"
                uneven |= dict.fromkeys(family.made_of(name, layout), wrong)
                continue
            for piece in pieces:
                shapes[piece.name] = piece.shape
                places[piece.name] = base_key, piece.runs
        base = {component.prefix + name: shape for name, shape in held.items()}
        return cls(family, base, shapes, places, odd, uneven)

    def unfit_for(self, reading: Spelling, leaf: str) -> str | None:
        """Why a tensor that the base splits otherwise is not found in it, where the base is at fault."""
        name = self.family.dotted(flatten(reading.name)) if reading.flat else reading.name
        for layout in self.family.all_layouts if name else ():
            parts = self.family.made_of(f"{name}{leaf}", layout)
            if uneven := next((self.uneven[part] for part in parts if part in self.uneven), None):
                return uneven
            if len(parts) > 1 and all(part in self.shapes for part in parts):
                keys = [self.places[part][0] for part in parts]
                listed = ", ".join(f"{key} {list(self.base[key])}" for key in dict.fromkeys(keys))
                return f"the base's tensors do not make one {name}: {listed}"
        return None

    def home(self, spelled: LayoutTensor) -> Home:
        """The base's rows that a tensor of another layout is made of."""
        if self._is_whole(spelled):
            return Home((Place(self.places[spelled.pieces[0].name][0]),), spelled.shape)
        found: dict[str, list[Run]] = {}
        for piece in spelled.pieces:
            base_key, held = self.places[piece.name]
            whole = (Run(0, 0, piece.shape[0] if piece.shape else 1),)
            runs = through(held or whole, inverse(piece.runs or whole))
            found.setdefault(base_key, []).extend(runs)
        places = (Place(key, self._rows(key, joined(runs), spelled.shape)) for key, runs in found.items())
        return Home(tuple(places), spelled.shape)

    def _is_whole(self, spelled: LayoutTensor) -> bool:
        """Whether it is one tensor of the base, as it is there."""
        piece, *others = spelled.pieces
        return not others and not piece.runs and not self.places[piece.name][1]

    def _rows(self, base_key: str, runs: Runs, shape: Shape) -> Runs:
        """The runs, none where they are all rows of both in order."""
        whole = (Run(0, 0, shape[0] if shape else 1),)
        return () if runs == whole and self.base[base_key] == shape else runs


def _by(spell: Callable[[str], str], homes: Homes) -> FlatHomes:
    """Homes by names spelled otherwise; more than one where that makes two names alike."""
    table: dict[str, tuple[Home, ...]] = {}
    for name, home in homes.items():
        spelled = spell(name)
        table[spelled] = (*table.get(spelled, ()), home)
    return table


def _flat_name(name: str) -> str:
    stem, dot, leaf = name.rpartition(".")
    return flatten(stem) + dot + leaf
