"""Modules of a LoRA x tensors of a component -> hits: which delta goes onto which base tensor.

Every LoRA tensor ends in a hit, a skip, or among the unmatched; ``faults`` decides what the rest mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fuselora.checkpoint import Component
from fuselora.errors import Fault, Notice
from fuselora.families import Family, Layout, RowOrder, SkipRule
from fuselora.families.runs import Runs
from fuselora.header import DTYPE_NAMES, TensorInfo
from fuselora.inner_encoders import inner_table
from fuselora.kinds import BadParts, Kind, Part, fits
from fuselora.kinds.dora import by_columns, check_magnitude
from fuselora.kinds.experts import PAIR_PARTS, PARTS, fits_parameter, of_parameter
from fuselora.kinds.kind import ALPHAS, MAGNITUDES
from fuselora.kinds.settings import owner
from fuselora.lora.adapter import Module
from fuselora.lora.grammar import Spelling, spellings
from fuselora.lora.scale import Alpha
from fuselora.name_table import Home, NameTable, flatten, name_table
from fuselora.plural import many
from fuselora.targets import Assignment, named_component
from fuselora.text_encoders import MEANINGS, ties_head
from fuselora.widening import widened

FUSABLE = frozenset(DTYPE_NAMES)
HEAD = re.compile(r"(?:^|[._])lm_head$")
# said of a whole LoRA; ``faults`` says it otherwise where more is known
OTHER_SIZE = "None of its shapes fits the base: the LoRA was made for another size of this model."
TIED = "the head is tied to the embedding (tie_word_embeddings in config.json): it has no weight of its own"


@dataclass(frozen=True, slots=True)
class Hit:
    """One delta on one base tensor.

    ``rows``: where the base's rows are among the delta's, whose layout's tensor has another ``shape``; empty
    if all are, in order. ``wide`` is the shape that the base tensor grows to, None if it stays. ``alpha`` is
    set by ``faults``, for kinds that have a rank; ``block`` is the factor of ``--blocks``.
    """

    base_key: str
    module: Module
    kind: Kind
    shape: tuple[int, ...]
    rows: Runs = ()
    wide: tuple[int, ...] | None = None
    alpha: Alpha | None = None
    block: float = 1.0

    @property
    def parts(self) -> Mapping[Part, TensorInfo]:
        """What the kind takes of the module, in its order."""
        return {part: self.module.parts[part] for part in self.kind.parts if part in self.module.parts}

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(self.parts.values())

    @property
    def rank(self) -> int | None:
        """The factors', or the one stated where they have none; None where no alpha counts."""
        return self.own_rank or (self.alpha.rank if self.alpha else None)

    @property
    def of_parameter(self) -> bool:
        """Whether a configuration targets the parameter itself, whose key names its owner alone."""
        return self.module.settings.of_parameter

    @property
    def own_rank(self) -> int | None:
        """The rank that its factors show, of each expert where they are those of several."""
        rank = self.kind.rank(self.module.shapes)
        return rank and rank // (self.module.settings.experts or 1)

    def is_nothing(self, zero: Collection[str]) -> bool:
        """Whether the tensor stays as it is, with these LoRA tensors known to hold only zeros."""
        if not MAGNITUDES.isdisjoint(self.parts):
            return False
        parts = frozenset(part for part, tensor in self.parts.items() if tensor.name in zero)
        return self.kind.is_nothing(parts) or (self.ratio == 0 and not self.kind.moves)

    @property
    def ratio(self) -> float:
        """alpha / rank, 1 where no alpha counts."""
        return self.alpha.ratio if self.alpha else 1.0

    def scale(self, strength: float) -> float:
        """strength * block * alpha / rank, without the last two where no alpha counts."""
        return strength * self.block * self.ratio


@dataclass(frozen=True, slots=True)
class Skip:
    """A module that stays unapplied, and why that is right. ``asked``: by ``--blocks``, so also if strict."""

    module: Module
    reason: str
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A module with no home in the base; ``likely`` is the family's guess at why."""

    module: Module
    likely: str | None


@dataclass(frozen=True, slots=True)
class Matching:
    """The outcome for one LoRA on one component.

    ``row_order``: what told its layout, where two have its names for other rows.
    """

    assignment: Assignment
    hits: tuple[Hit, ...]
    skipped: tuple[Skip, ...]
    unmatched: tuple[Unmatched, ...]
    faults: tuple[Fault, ...]
    notices: tuple[Notice, ...]
    row_order: RowOrder | None = None

    @property
    def adds(self) -> bool:
        """Whether any delta counts: not at strength 0, nor where all modules are left out."""
        return any(hit.scale(self.assignment.strength) != 0 for hit in self.hits)


def match(assignment: Assignment, family: Family | None, layout: Layout | None) -> Matching:
    """Find every module's tensors. Shapes are checked exactly; nothing is reshaped or broadcast."""
    is_linear = assignment.component.is_text_encoder or family is not None
    family = None if assignment.component.is_text_encoder else family
    table = name_table(assignment.component, family, layout)
    modules = tuple(map(_of_linear, assignment.modules)) if is_linear else assignment.modules
    if unknown := _unknown_layout(assignment, family):
        return Matching(assignment, (), (), (), (unknown,), ())
    orders = _lora_orders(table, assignment, family)
    search = _Search(assignment, table, tuple(order.layout for order in orders), _inner_tables(assignment))
    hits: list[Hit] = []
    faults: list[Fault] = []
    homeless: list[Module] = []
    for module in modules:
        found, wrong = search.module(module)
        hits += found
        faults += wrong
        if not found and not wrong and not module.parts.keys() <= ALPHAS:
            homeless.append(module)
    skipped, unmatched = _explain(homeless, assignment.component, family, layout, table)
    hits = [widened(hit, assignment.component, family, layout) for hit in hits]
    faults += _shape_faults(assignment, hits, table) + _double_faults(assignment, hits, family)
    faults += _stray_alphas(assignment, modules)
    notices = (*_orphan_notices(assignment, modules), *_linear_notices(assignment, modules))
    order = search.order_that_counts(orders)
    return Matching(assignment, tuple(hits), skipped, unmatched, tuple(faults), notices, order)


def _of_linear(module: Module) -> Module:
    """As PEFT has it: ``fan_in_fan_out`` is for transformers' ``Conv1D``, and reset for linear layers."""
    turned = any(kind.name == "transposed" for kind in module.kinds)
    return replace(module, settings=replace(module.settings, transposed=False)) if turned else module


def plain_name(module: str) -> str:
    """The module's name with every prefix off."""
    return spellings(module)[-1].name


def recorded_name(module: str) -> str:
    """As the marker has it: plain, but for the text encoder: one file may hold several of those."""
    named = named_component(module)
    return f"{named}.{plain_name(module)}" if named in MEANINGS else plain_name(module)


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks one module up at a time.

    ``layouts`` decide names that stand for different tensors, in order; ``inner``: the tables of the text
    encoders in the component's own files.
    """

    assignment: Assignment
    table: NameTable
    layouts: tuple[Layout, ...]
    inner: Mapping[str, NameTable]

    def module(self, module: Module) -> tuple[list[Hit], list[Fault]]:
        if self._is_tied_head(module):
            return [], [self._fault("tied", module, TIED, "Leave its keys out of the file.")]
        if module.parts.keys() >= PAIR_PARTS and (named := self._parameters(module)):
            return self._on_parameter(module, named)
        hits: list[Hit] = []
        faults: list[Fault] = []
        missing: list[Kind] = []
        for kind in module.kinds:
            if kind.lacks(module.parts):
                continue  # the adapter has said so
            homes = self._homes(module, kind.leaves)
            if len(homes) == 1:
                if kind.applies(module.settings, module.shapes, homes[0].shape):
                    hits += _hits(homes[0], module, kind)
            elif homes:
                text = f"could be {' or '.join(map(str, homes))}"
                faults.append(self._fault("ambiguous", module, text, self._layouts_hint(module, kind)))
            elif not kind.if_there:
                missing.append(kind)
        if missing and (hits or self._weight_exists(module)):
            faults += [
                self._fault("no_target", module, f"the base has no {kind.home} to add the {kind.name} to")
                for kind in missing
            ]
        return hits, faults

    def _parameters(self, module: Module) -> dict[Home, Module]:
        """What the configuration's targets can mean in the base, and the module named after each."""
        name = owner(module.name)
        named = [replace(module, name=name + leaf) for leaf in module.settings.parameters]
        return {home: found for found in named for home in self._homes(found, ("",))}

    def _on_parameter(self, module: Module, homes: Mapping[Home, Module]) -> tuple[list[Hit], list[Fault]]:
        """PEFT's key does not say which parameter is meant: the only one, or the only one that fits."""
        if extra := sorted(module.parts.keys() - PARTS):
            text = f"{' and '.join(extra)} beside a pair of a parameter (target_parameters)"
            return [], [self._fault("unsupported", module, f"{text} is not fused")]
        fitting = [home for home in homes if fits_parameter(module.shapes, home.shape)]
        if len(homes) > 1 and len(fitting) != 1:
            listed = " or ".join(f"{home} {list(home.shape)}" for home in fitting or homes)
            text = f"its shapes do not tell whether it is for {listed}"
            return [], [self._fault("ambiguous", module, text)]
        (home,) = fitting if fitting else homes
        meant = homes[home]
        meant = replace(meant, settings=of_parameter(meant.settings, module.shapes, home.shape))
        return [hit for kind in meant.kinds for hit in _hits(home, meant, kind)], []

    def _homes(self, module: Module, leaves: Sequence[str]) -> tuple[Home, ...]:
        asked = list(self._asked(module))
        for leaf, find in product(leaves, (self._choose, NameTable.find_bare)):
            found = dict.fromkeys(home for table, reading in asked for home in find(table, reading, leaf))
            if found:
                return tuple(found)
        return ()

    def _asked(self, module: Module) -> Iterator[tuple[NameTable, Spelling]]:
        """In which tables a module is looked up, by each reading of its name."""
        component = self.assignment.component
        if meant := component.encoders_inside(named_component(module.name)):
            return product((self.inner[one.name] for one in meant), spellings(module.name))
        return product((self.table,), _readings(module, component))

    def _choose(self, table: NameTable, reading: Spelling, leaf: str) -> tuple[Home, ...]:
        found = table.find(reading, leaf)
        if preferred := next((layout for layout in self.layouts if layout in found), None):
            return found[preferred]
        return tuple(dict.fromkeys(home for homes in found.values() for home in homes))

    def order_that_counts(self, orders: Sequence[RowOrder]) -> RowOrder | None:
        """The first of ``orders`` that decided a name which means other rows in another layout."""
        for module in self.assignment.modules if orders else ():
            for reading in _readings(module, self.assignment.component):
                found = self.table.find(reading, ".weight")
                if len(set(found.values())) > 1:
                    return next((order for order in orders if order.layout in found), None)
        return None

    def _layouts_hint(self, module: Module, kind: Kind) -> str | None:
        """The option that decides, where layouts disagree about the name."""
        readings = _readings(module, self.assignment.component)
        found = {
            layout
            for reading, leaf in product(readings, kind.leaves)
            for layout in self.table.find(reading, leaf)
        }
        meant = self.assignment.component.encoders_inside(named_component(module.name))
        if len(meant) > 1:
            return f"Say which: {' or '.join(f'--lora {one.name}=FILE' for one in meant)}"
        if len(found) < 2:
            return None
        return f"Say which layout its names are in with --lora-layout: {' or '.join(sorted(found))}."

    def _is_tied_head(self, module: Module) -> bool:
        is_head = HEAD.search(plain_name(module.name)) is not None
        return is_head and ties_head(self.assignment.component.config)

    def _weight_exists(self, module: Module) -> bool:
        return bool(self._homes(module, (".weight",)))

    def _fault(self, kind: str, module: Module, what: str, hint: str | None = None) -> Fault:
        name = module.name
        return Fault(kind, f"{name}: {what}", path=self.assignment.adapter.name, key=name, hint=hint)


def _inner_tables(assignment: Assignment) -> dict[str, NameTable]:
    """Those of the text encoders in the component's own files that any module names."""
    component = assignment.component
    named = {named_component(module.name) for module in assignment.modules} if component.inner else ()
    return {
        one.name: inner_table(component, one) for name in named for one in component.encoders_inside(name)
    }


def _readings(module: Module, component: Component) -> tuple[Spelling, ...]:
    """How a module's name can be read; where its prefix names a text encoder, for no other model."""
    readings = spellings(module.name)
    if component.is_text_encoder:
        return readings
    return tuple(reading for reading in readings if reading.component not in MEANINGS)


def _hits(home: Home, module: Module, kind: Kind) -> list[Hit]:
    return [Hit(place.base_key, module, kind, home.shape, place.rows) for place in home.places]


def _unknown_layout(assignment: Assignment, family: Family | None) -> Fault | None:
    """A layout that the user said and the base's family does not have."""
    said = assignment.adapter.location.spec.layout
    if said is None or (family and said in family.all_layouts):
        return None
    known = f"{family.name}: {', '.join(family.all_layouts)}" if family else "a base of no known family"
    return Fault("layout", f"{said} is no layout of {known}", path=assignment.adapter.name)


def _lora_orders(table: NameTable, assignment: Assignment, family: Family | None) -> tuple[RowOrder, ...]:
    """The layouts that a LoRA can be spelled in, the likeliest first, and what tells.

    As the user says, by names of one layout alone, and by a sign. Where none of them has a name that other
    layouts use for different tensors, that is ambiguous: names of several layouts, say, in one file.
    """
    if family is None:
        return ()
    if said := assignment.adapter.location.spec.layout:
        return (RowOrder(said, "--lora-layout"),)
    adapter = assignment.adapter
    signed = family.order_of_lora((tensor.name for tensor in adapter.tensors), adapter.metadata)
    voted = _voted(table, assignment)
    named = RowOrder(voted, "names of its own") if voted else None
    return tuple(order for order in (named, signed) if order)


def _voted(table: NameTable, assignment: Assignment) -> Layout | None:
    """The layout that alone has some of the names; None when none has, or several have."""
    votes: set[Layout] = set()
    for module in assignment.modules:
        for reading in _readings(module, assignment.component):
            for leaf in (".weight", ".bias"):
                found = table.find(reading, leaf)
                votes |= found.keys() if len(found) == 1 else set()
    return votes.pop() if len(votes) == 1 else None


def _explain(
    homeless: Sequence[Module],
    component: Component,
    family: Family | None,
    layout: Layout | None,
    table: NameTable,
) -> tuple[tuple[Skip, ...], tuple[Unmatched, ...]]:
    """Sort modules without a home into the family's harmless ones and the rest."""
    if family is None or not homeless:
        return (), tuple(Unmatched(module, _for_encoder(module, component)) for module in homeless)
    shapes = family.canonical_shapes(component.model_shapes(), layout)
    skipped, unmatched = [], []
    for module in homeless:
        rule = _skip_rule(module, family)
        if rule is not None and rule.harmless(shapes):
            skipped.append(Skip(module, rule.reason))
        else:
            likely = rule.reason if rule else _for_encoder(module, component) or _unfit(module, table)
            unmatched.append(Unmatched(module, likely))
    return tuple(skipped), tuple(unmatched)


def _for_encoder(module: Module, component: Component) -> str | None:
    """Why keys of a text encoder have no home in a transformer."""
    named = named_component(module.name)
    if component.is_text_encoder or named not in MEANINGS or component.encoders_inside(named):
        return None
    return f"it is for the text encoder {named}, which this base does not have"


def _unfit(module: Module, table: NameTable) -> str | None:
    """What of the base's own shapes keeps a module from its home."""
    leaves = dict.fromkeys(leaf for kind in module.kinds for leaf in kind.leaves)
    found = (table.unfit(reading, leaf) for reading, leaf in product(spellings(module.name), leaves))
    return next(filter(None, found), None)


def _skip_rule(module: Module, family: Family) -> SkipRule | None:
    """The rule that speaks of a module, in whichever layout it is spelled."""
    readings = spellings(module.name)
    layouts = family.all_layouts
    names = {family.canonical_name(s.name, layout) for s in readings for layout in layouts}
    flat = {flatten(s.name) for s in readings if s.flat}
    for rule in family.skips:
        if any(map(rule.covers, names)) or any(map(rule.covers_flat, flat)):
            return rule
    return None


def _shape_faults(assignment: Assignment, hits: Sequence[Hit], table: NameTable) -> list[Fault]:
    tensors = assignment.component.tensors()
    odd = table.pieces.odd if table.pieces else {}
    found = (_shape_fault(assignment, hit, tensors[hit.base_key]) for hit in hits)
    return [_blamed(fault, hit, odd) for hit, fault in zip(hits, found, strict=True) if fault]


def _blamed(fault: Fault, hit: Hit, odd: Mapping[str, str]) -> Fault:
    """Where the base's own shape is none of its layout, that is said in place of the LoRA's size."""
    if fault.hint != OTHER_SIZE or hit.base_key not in odd:
        return fault
    return replace(fault, hint=f"That is no shape of such a layer: {odd[hit.base_key]}.")


def _shape_fault(assignment: Assignment, hit: Hit, base: TensorInfo) -> Fault | None:
    name, path = hit.module.name, assignment.adapter.name
    if hit.module.reshape not in (None, hit.wide or base.shape) and hit.kind.home == "weight":
        wider = f"from {list(base.shape)} to {list(hit.module.reshape or ())} (reshape_weight)"
        text = f"{name}: widens {hit.base_key} {wider}, which fuselora does of no such tensor"
        return Fault("unsupported", text, path=path, key=name)
    try:
        shape = hit.kind.shape(hit.module.shapes, hit.shape)
        check_magnitude(hit.kind, hit.module.shapes, hit.shape)
        hit.kind.asks(hit.module.settings, hit.module.shapes, hit.shape)
        _check_rows(hit)
    except BadParts as error:
        return Fault(error.code, f"{name}: {error}", path=path, key=name)
    if base.dtype in FUSABLE and not fits(shape, hit.wide or hit.shape):
        others = f", as rows of {list(hit.shape)}" if hit.rows else ""
        text = f"{name}: the delta is {list(shape)}, but {hit.base_key} is {list(base.shape)}{others}"
        return Fault("shape", text, path=path, key=name, hint=OTHER_SIZE)
    return None


def _check_rows(hit: Hit) -> None:
    """Raises ``BadParts`` for a kind that needs rows of its own layer that the base has elsewhere."""
    if not hit.rows:
        return
    module, mixes = hit.module, hit.kind.mixes_rows
    if mixes or module.settings.experts or by_columns(hit.kind, module.shapes, hit.shape):
        text = f"{hit.kind.name} needs its whole layer, of which {hit.base_key} has the rows in another way"
        raise BadParts(text, "unsupported")


def _double_faults(assignment: Assignment, hits: Sequence[Hit], family: Family | None) -> list[Fault]:
    """Rows meant twice in one file, by two spellings or two kinds of diff; pair and diff may meet.

    Two that both give the changed tensor may not: what the second one starts from nobody says.
    """
    seen: dict[tuple[str, str], list[Hit]] = {}
    faults = []
    for hit in hits:
        sorts = ["scaled" if hit.kind.scaled else "plain", *["moves"] * hit.kind.moves_with(hit.parts)]
        others = [seen.setdefault((hit.base_key, sort), []) for sort in sorts]
        met = (other for group in others for other in group if overlap(other.rows, hit.rows))
        if first := next(met, None):
            one, two = first.tensors[0].name, hit.tensors[0].name
            text = f"{hit.base_key} is meant twice, by {one} and by {two}"
            hint = _repeats_hint((first.module, hit.module), family)
            faults.append(Fault("twice", text, path=assignment.adapter.name, key=hit.module.name, hint=hint))
        for group in others:
            group.append(hit)
    return faults


def _repeats_hint(modules: Sequence[Module], family: Family | None) -> str:
    """Which of two spellings of a layer to leave out, where a family knows that."""
    pattern = family.repeats if family else ""
    found = [match[0] for m in modules if pattern and (match := re.search(pattern, plain_name(m.name)))]
    if len(found) != 1:
        return "Leave the keys of one of the two out of the file."
    return f"Leave the keys of *{found[0]} out of the file, as diffusers does: they repeat the others."


def overlap(one: Runs, two: Runs) -> bool:
    """Whether two hits share rows of the base; without runs a hit has them all."""
    if not one or not two:
        return True
    return any(a.first < b.first + b.n and b.first < a.first + a.n for a in one for b in two)


def _stray_alphas(assignment: Assignment, modules: Sequence[Module]) -> Iterator[Fault]:
    """An alpha whose module has its factors under another spelling would be lost."""
    scaled = {recorded_name(m.name): m.name for m in modules if any(k.uses_alpha for k in m.kinds)}
    for module in modules:
        owner_name = scaled.get(recorded_name(module.name))
        if module.parts.keys() <= ALPHAS and owner_name:
            text = f"{module.name}: an alpha for {owner_name}, which is spelled otherwise in the same file"
            yield Fault("alpha", text, path=assignment.adapter.name, key=module.name)


def _linear_notices(assignment: Assignment, modules: Sequence[Module]) -> Iterator[Notice]:
    n_turned = sum(ours is not theirs for ours, theirs in zip(modules, assignment.modules, strict=True))
    if n_turned:
        name = assignment.adapter.name
        what = f"says fan_in_fan_out of {many(n_turned, 'linear layer')} of {assignment.component.name}"
        text = f"{name}: {what}: as PEFT loads it, nothing is transposed"
        yield Notice("fan_in_fan_out", text, {"lora": name, "modules": n_turned})


def _orphan_notices(assignment: Assignment, modules: Sequence[Module]) -> Iterator[Notice]:
    held = [m for m in modules if not ALPHAS.isdisjoint(m.parts)]
    orphans = [m.name for m in held if not any(k.uses_alpha for k in m.kinds)]
    if orphans:
        text = f"{assignment.adapter.name}: {len(orphans)} alpha without a pair, such as {orphans[0]}"
        yield Notice("orphan_alpha", text, {"modules": orphans})
