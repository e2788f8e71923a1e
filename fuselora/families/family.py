"""The shape of a family's data, and the questions it answers: whose name, which layout, what kin.

Every family has a canonical layout, in which the rest of its data speaks; the others are rows that lead
there. A pattern is a dotted name as in ``families.pattern``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fuselora.families.few_step import FewStep, few_step_named
from fuselora.families.kin import Branch, Kin, Measure, SkipRule
from fuselora.families.model_class import ModelClass
from fuselora.families.pattern import (
    NUMBER,
    Patterns,
    Shapes,
    compiled,
    filled,
    flat_form_of,
    form_of,
    split_leaf,
    unnumbered,
    unnumbered_flat,
)
from fuselora.families.renames import Renames, Spelled
from fuselora.families.runs import Runs

# a name without its numbers: of the module, as it is, and of one without dots as a flattened one
Forms = tuple[str, str, str]
Layout = str  # "diffusers", "native", or what a family calls one more


@dataclass(frozen=True, slots=True)
class Sign:
    """What tells a layout whose names another layout has as well.

    ``base_has``: a pattern of tensors that only such a base has. ``lora_key``: searched for in a LoRA's keys.
    ``lora_metadata``: a key of its metadata, and the value that says so. ``says``: which files have it, for
    whoever has to choose.
    """

    layout: Layout
    says: str
    base_has: str = ""
    lora_key: str = ""
    lora_metadata: tuple[str, str] | None = None

    def of_lora(self, keys: Iterable[str], metadata: Mapping[str, str]) -> str | None:
        """Where a LoRA has it, in words."""
        if self.lora_metadata and metadata.get(self.lora_metadata[0]) == self.lora_metadata[1]:
            return f"{' '.join(self.lora_metadata)} in its metadata"
        found = (key for key in keys if self.lora_key and re.search(self.lora_key, key))
        return next((f"its key {key}" for key in found), None)

    def of_base(self, names: Iterable[str]) -> str | None:
        """Where a base has it, in words."""
        found = (name for name in names if self.base_has and compiled(self.base_has).fullmatch(name))
        return next((f"its tensor {name}" for name in found), None)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Of layouts that share their names, the one whose order the rows are read in, and what told."""

    layout: Layout
    told_by: str


@dataclass(frozen=True, slots=True)
class Widening:
    """What config.json says of a weight's columns: ``field`` counts them, and another field may follow it.

    ``follower`` has the same value where it is null; when the weight grows, it must say the old one.
    """

    field: str
    follower: str | None = None

    def changes(self, config: Mapping[str, object], before: int, after: int) -> dict[str, int]:
        """What such a config says otherwise once the weight has grown; nothing if it lacks the field."""
        if self.field not in config:
            return {}
        follows = self.follower is not None and config.get(self.follower) is None
        return {self.field: after, **({self.follower: before} if follows and self.follower else {})}


@dataclass(frozen=True, slots=True)
class Piece:
    """A canonical tensor, or what a tensor of another layout has of it: ``runs`` lead from that one to it."""

    name: str
    shape: tuple[int, ...]
    runs: Runs


@dataclass(frozen=True, slots=True)
class LayoutTensor:
    """A tensor as a layout spells it, and the canonical ones that it is made of."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)  # without slots, so that what is derived stays
class Family:
    """One model family.

    ``canonical`` is the layout that all patterns here are in, the one that splits tensors most; ``layouts``
    are the others. ``names``: patterns of all modules and bare parameters. ``block``: the pattern whose
    count is the number of blocks. ``keep_float32``: name segments (diffusers spelling) that the model class
    keeps in float32. ``experts``: component -> role, for families that come as two experts. ``measures`` and
    ``branches``: what tells the models apart by a LoRA alone. ``few_step``: of the rows that fit a name the
    first counts. ``boundary_ratios``: model -> the part of the noise schedule, from the end, that is the
    second expert's. ``classes``: diffusers' classes of these models. ``signs``: of layouts that share names,
    the one whose sign is not there being the first in ``layouts``. ``widens``: weights that a LoRA may give
    more columns. ``beside``: modules that single files hold
    beside the model, under no prefix, and that LoRAs may be for. ``pipelines``: classes in model_index.json
    that serve some of the models alone. ``known_as``: searched for, case aside, in what trainers and
    configurations call the model that a LoRA was trained on. ``repeats``: searched for in module names, what
    some trainers save of a layer a second time. ``blocks_alike``: whether every block has the same layers, so
    that a LoRA of some layers is one of all blocks or of chosen ones.
    """

    name: str
    canonical: Layout
    layouts: Mapping[Layout, Renames]
    names: frozenset[str]
    block: str
    kin: tuple[Kin, ...]
    keep_float32: frozenset[str] = frozenset()
    experts: Mapping[str, str] = field(default_factory=dict)
    skips: tuple[SkipRule, ...] = ()
    measures: tuple[Measure, ...] = ()
    branches: tuple[Branch, ...] = ()
    few_step: tuple[FewStep, ...] = ()
    boundary_ratios: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[ModelClass, ...] = ()
    signs: tuple[Sign, ...] = ()
    widens: Mapping[str, Widening] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    pipelines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    known_as: str = ""
    blocks_alike: bool = True
    repeats: str = ""

    # Names

    def is_named(self, text: str) -> bool:
        """Whether a model's name, or what a trainer calls it, is that of one of this family."""
        return bool(self.known_as) and re.search(self.known_as, text, re.IGNORECASE) is not None

    @property
    def all_layouts(self) -> tuple[Layout, ...]:
        return (self.canonical, *self.layouts)

    def share(self, names: Iterable[str]) -> float:
        """The part of these tensor or module names, in any layout, that the family has."""
        return self.share_of(forms_of(names))

    def share_of(self, forms: Mapping[Forms, int]) -> float:
        """The same of names whose ``forms_of`` are known."""
        known, flat = self._known
        found = sum(
            n
            for (module, whole, joined), n in forms.items()
            if module in known or whole in known or joined in flat
        )
        return found / sum(forms.values()) if forms else 0.0

    @cached_property
    def _known(self) -> tuple[frozenset[str], frozenset[str]]:
        """All names without their numbers, dotted and with an underscore for every dot."""
        theirs = (row.theirs for renames in self.layouts.values() for row in renames.rows)
        known = frozenset(map(unnumbered, (*self.names, *theirs, *self._of_the_rest())))
        return known, frozenset(name.replace(".", "_") for name in known)

    def _of_the_rest(self) -> Iterator[str]:
        """Names of another layout that only a row for many of them leads to."""
        for renames in self.layouts.values():
            for row in renames.rows:
                if row.theirs.endswith("{rest}"):
                    start = unnumbered(row.ours[0].removesuffix("{rest}"))
                    ours = (name for name in map(unnumbered, self.names) if name.startswith(start))
                    yield from (row.theirs.removesuffix("{rest}") + name[len(start) :] for name in ours)

    def canonical_name(self, name: str, layout: Layout | None) -> str:
        """The canonical name of a tensor or module of ``layout``, the first where it is made of several."""
        return self.made_of(name, layout)[0]

    def made_of(self, name: str, layout: Layout | None) -> tuple[str, ...]:
        """The canonical tensors or modules that one of ``layout`` is made of, whatever their shapes."""
        found = self._row_of(name, layout)
        return tuple(ours + found[1] for ours in found[0].ours) if found else (name,)

    def spelled_in(self, canonical: str, layout: Layout) -> str:
        """What ``layout`` calls the tensor or module that has this canonical one."""
        if layout == self.canonical:
            return canonical
        found = _by_name(self.layouts[layout].of_ours, canonical)
        return found[0].theirs + found[1] if found else canonical

    def translate(self, name: str, layout: Layout | None, to: Layout) -> str:
        """A tensor or module name of ``layout`` as ``to`` spells it."""
        return self.spelled_in(self.canonical_name(name, layout), to)

    def dotted(self, flat: str) -> str | None:
        """A name in which every dot became an underscore, as a canonical pattern or a row spells it."""
        if found := self._dotted_canonical(flat):
            return found
        for layout, renames in self.layouts.items():
            if spelled := renames.of_flat(flat):
                ours = self._dotted_canonical(spelled.ours[0].replace(".", "_"))
                return self.spelled_in(ours, layout) if ours else spelled.theirs
        return None

    def _dotted_canonical(self, flat: str) -> str | None:
        names, patterns = self._flat_names
        found = patterns.find(flat, flat_form_of(flat))
        return filled(names[found[0]], found[1]) if found else None

    @cached_property
    def _flat_names(self) -> tuple[tuple[str, ...], Patterns]:
        names = tuple(sorted(self.names))
        return names, Patterns([name.replace(".", "_") for name in names], unnumbered_flat)

    def layout_of(self, names: Iterable[str]) -> Layout | None:
        """The layout in which most of ``names`` are spelled; None when no one layout has most."""
        if not self.layouts:
            return self.canonical
        names = tuple(names)
        votes: Counter[Layout] = Counter()
        for name, n in self._alike(names).items():
            if layout := self._only_in(name):
                votes[layout] += n
        most = [layout for layout, n in votes.items() if n == max(votes.values())]
        if most:
            return most[0] if len(most) == 1 else None
        order = self.order_of_base(names)
        return order.layout if order else None

    def twins(self, names: Iterable[str], layout: Layout | None) -> Iterator[tuple[str, str]]:
        """Pairs of tensors of one base that are the same tensor or share rows, by their canonical names.

        Such as a fused layer beside its parts. ``layout`` is the base's.
        """
        held: dict[str, str] = {}
        told: set[str] = set()
        read_in = self._reader(layout)
        for name in names:
            for canonical in self.made_of(name, read_in(name)):
                twin = held.setdefault(canonical, name)
                if twin != name and twin not in told:
                    told |= {twin, name}
                    yield twin, name

    def _reader(self, layout: Layout | None) -> Callable[[str], Layout | None]:
        """The layout of each name in a file of ``layout``: what only others call so is read as theirs."""
        known: dict[str, Layout | None] = {}

        def read_in(name: str) -> Layout | None:
            like = self._like(name)
            if like not in known:
                spelled = self._spelled_so(like)
                known[like] = layout if layout in spelled or not spelled else spelled[0]
            return known[like]

        return read_in

    def _alike(self, names: Iterable[str]) -> Mapping[str, int]:
        """Of names that differ in numbers that no row speaks of itself, one, and how many there are."""
        return Counter(map(self._like, names))

    def _like(self, name: str) -> str:
        """A name that every row speaks of as it does of this one."""
        top = self._top_number
        return NUMBER.sub(lambda number: number[0] if int(number[0]) <= top else str(top + 1), name)

    @cached_property
    def _top_number(self) -> int:
        """The highest number that stands in a row as it is."""
        rows = (row for renames in self.layouts.values() for row in renames.rows)
        patterns = (pattern for row in rows for pattern in (row.theirs, *row.ours))
        return max((int(n) for pattern in patterns for n in NUMBER.findall(pattern)), default=0)

    def order_of_lora(self, keys: Iterable[str], metadata: Mapping[str, str]) -> RowOrder | None:
        """Of layouts that share their names, the one whose sign a LoRA has, else the first."""
        keys = tuple(keys)
        return self._order([(sign.layout, sign.of_lora(keys, metadata)) for sign in self.signs])

    def order_of_base(self, names: Iterable[str]) -> RowOrder | None:
        """Of layouts that share their names, the one that a tensor is the sign of, else the first."""
        names = tuple(names)
        return self._order([(sign.layout, sign.of_base(names)) for sign in self.signs])

    def _order(self, signs: Sequence[tuple[Layout, str | None]]) -> RowOrder | None:
        """The first layout that has a sign."""
        found = (RowOrder(layout, told_by) for layout, told_by in signs if told_by)
        others = " or ".join(layout for layout, _ in signs)
        return next(found, RowOrder(next(iter(self.layouts)), f"no sign of {others}") if signs else None)

    def _only_in(self, name: str) -> Layout | None:
        """The one layout that spells a tensor so, where the layouts differ about it."""
        found = self._spelled_so(name)
        return found[0] if len(found) == 1 else None

    def _spelled_so(self, name: str) -> list[Layout]:
        """The layouts that spell a tensor so, of those that have a row about it."""
        found = [layout for layout in self.layouts if self._row_of(name, layout)]
        return found + [self.canonical] * any(_by_name(r.of_ours, name) for r in self.layouts.values())

    def _row_of(self, name: str, layout: Layout | None) -> tuple[Spelled, str] | None:
        renames = self.layouts.get(layout) if layout else None
        return _by_name(renames.of_theirs, name) if renames else None

    # Shapes

    def pieces(self, name: str, shapes: Shapes, layout: Layout | None) -> tuple[Piece, ...]:
        """The canonical tensors that the tensor ``name`` of ``layout`` is made of.

        Raises ``ValueError`` where its shape has no room for them.
        """
        shape, found = shapes[name], self._row_of(name, layout)
        if found is None:
            return (Piece(name, shape, ()),)
        spelled, leaf = found
        if spelled.row.is_plain:
            return (Piece(spelled.ours[0] + leaf, shape, ()),)
        weight = shapes.get(spelled.theirs + ".weight", shape)
        sizes = spelled.row.sizes((*shape[:1], *weight[1:]), len(spelled.ours))
        runs = spelled.runs(sizes, weight[1] if len(weight) > 1 else 0)
        return tuple(
            Piece(ours + leaf, (size, *shape[1:]), rows)
            for ours, size, rows in zip(spelled.ours, sizes, runs, strict=True)
        )

    def spellings(self, canonical: Shapes, layout: Layout) -> Iterator[LayoutTensor]:
        """Every tensor of ``layout`` that can be made of canonical ones of these names and shapes."""
        if layout == self.canonical:
            yield from (LayoutTensor(n, shape, (Piece(n, shape, ()),)) for n, shape in canonical.items())
            return
        for name, shape in canonical.items():
            found = _by_name(self.layouts[layout].of_ours, name)
            if found is None:
                yield LayoutTensor(name, shape, (Piece(name, shape, ()),))
            elif found[0].row.is_plain:
                yield LayoutTensor(found[0].theirs + found[1], shape, (Piece(name, shape, ()),))
            elif found[0].part == 0 and (spelling := _assembled(*found, canonical)):
                yield spelling

    def canonical_shapes(self, shapes: Shapes, layout: Layout | None = None) -> Shapes:
        """The same tensors by canonical names; what is no tensor of the layout stays as it is."""
        layout = layout or self.layout_of(shapes)
        if layout is None:
            return shapes
        read_in = self._reader(layout)
        pieces = (piece for name in shapes for piece in self._pieces_or_it(name, shapes, read_in(name)))
        return {piece.name: piece.shape for piece in pieces}

    def _pieces_or_it(self, name: str, shapes: Shapes, layout: Layout | None) -> tuple[Piece, ...]:
        """Without a shape the first canonical tensor stands for all that it is made of."""
        try:
            if shapes[name]:
                return self.pieces(name, shapes, layout)
        except ValueError:
            pass
        return (Piece(self.canonical_name(name, layout), (), ()),)

    def keeps_float32(self, name: str, layout: Layout | None) -> bool:
        """Whether the model class keeps this tensor of a checkpoint in ``layout`` in float32."""
        spelled = name
        if layout not in (None, "diffusers") and "diffusers" in self.all_layouts:
            spelled = self.translate(name, layout, "diffusers")
        return not self.keep_float32.isdisjoint(spelled.split("."))

    # Models

    def models_of(self, shapes: Shapes, n_experts: int = 1, layout: Layout | None = None) -> tuple[str, ...]:
        """The published models that tensors of these names and shapes belong to; any layout if not told."""
        layout = layout or self.layout_of(shapes)
        fitting = [kin for kin in self.kin if self._has_witnesses(kin, shapes, layout)]
        if not fitting:
            return ()
        n_blocks = len(self.block_numbers(self.canonical_shapes(shapes, layout)))
        return tuple(model for kin in fitting if kin.blocks == n_blocks for model in kin.named(n_experts))

    def _has_witnesses(self, kin: Kin, shapes: Shapes, layout: Layout | None) -> bool:
        return all(_fits(self._shape(name, shapes, layout), wanted) for name, wanted in kin.witnesses.items())

    def _shape(self, canonical: str, shapes: Shapes, layout: Layout | None) -> tuple[int, ...]:
        """The shape of the tensor that has this canonical name; () if there is none."""
        spelled = self.spelled_in(canonical, layout or self.canonical)
        if spelled not in shapes:
            return shapes.get(canonical, ())
        pieces = self._pieces_or_it(spelled, shapes, layout)
        return next((piece.shape for piece in pieces if piece.name == canonical), ())

    def block_numbers(self, names: Iterable[str]) -> frozenset[int]:
        """The blocks that have a tensor among these canonical ``names``."""
        pattern = compiled(self.block)
        return frozenset(int(found.group(1)) for name in names if (found := pattern.match(name)))

    def kin_of_deltas(self, canonical: Shapes) -> tuple[Kin, ...]:
        """The models that have room for all deltas of a LoRA, given by canonical tensor names."""
        n_blocks = max(self.block_numbers(canonical), default=-1) + 1
        sizes = [(measure, measure.of(canonical)) for measure in self.measures]
        branches = [(branch, branch.is_in(canonical)) for branch in self.branches]
        return tuple(
            kin
            for kin in self.kin
            if n_blocks <= kin.blocks
            and all(measure.allows(shown, kin) for measure, shown in sizes)
            and all(branch.allows(present, kin) for branch, present in branches)
        )

    def kin_but_for(self, rule: SkipRule, canonical: Shapes) -> tuple[Kin, ...]:
        """The models that have room for all deltas but those that ``rule`` lets them lack."""
        rest = {name: shape for name, shape in canonical.items() if not rule.covers(split_leaf(name)[0])}
        if len(rest) == len(canonical):
            return ()
        whole = self.kin_of_deltas(canonical)
        return tuple(k for k in self.kin_of_deltas(rest) if k not in whole and rule.harmless(k.witnesses))

    def few_step_named(self, name: str) -> FewStep | None:
        """The published few-step LoRA that a file, folder or repository of this name is."""
        return few_step_named(self.few_step, name)


def forms_of(names: Iterable[str]) -> Mapping[Forms, int]:
    """How many of these names have each form, which all blocks of a model share."""
    return Counter(map(_forms, names))


def _forms(name: str) -> Forms:
    return form_of(split_leaf(name)[0]), form_of(name), "" if "." in name else flat_form_of(name)


def _by_name(find: Callable[[str, str], Spelled | None], name: str) -> tuple[Spelled, str] | None:
    """A row that speaks of a whole tensor name, or of its module; with what is left of the name."""
    form = form_of(name)
    if found := find(name, form):
        return found, ""
    stem, leaf = split_leaf(name)
    found = find(stem, form.removesuffix(leaf)) if leaf else None
    return (found, leaf) if found else None


def _assembled(found: Spelled, leaf: str, canonical: Shapes) -> LayoutTensor | None:
    """The tensor of another layout that is made of several, or of one in another order; None if one lacks."""
    names = [ours + leaf for ours in found.ours]
    shapes = [canonical[name] for name in names if name in canonical]
    if len(shapes) < len(names) or not all(shapes) or len({shape[1:] for shape in shapes}) > 1:
        return None
    try:
        weight = canonical.get(f"{found.ours[0]}.weight", shapes[0])
        runs = found.runs([shape[0] for shape in shapes], weight[1] if len(weight) > 1 else 0)
    except ValueError:
        return None
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return LayoutTensor(found.theirs + leaf, whole, tuple(map(Piece, names, shapes, runs)))


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted, strict=True))
