"""Modules of a LoRA x tensors of a component -> hits: which delta goes onto which base tensor.

Every LoRA tensor ends in a hit, a skip, or among the unmatched; ``faults`` decides what the rest mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fuselora.checkpoint import Component
from fuselora.errors import Fault, Notice
from fuselora.families import Family, Layout, SkipRule
from fuselora.header import TensorInfo
from fuselora.lora.adapter import Module
from fuselora.lora.grammar import LEAVES, Part, Spelling, spellings
from fuselora.lora.scale import Alpha
from fuselora.targets import FIRST, Assignment, key_owners, named_component, one_for_all

Kind = Literal["pair", "diff", "diff_b", "diff_m"]
FUSABLE = frozenset({"F32", "BF16", "F16"})
PARTS: Mapping[Kind, tuple[Part, ...]] = {
    "pair": ("up", "down"),
    "diff": ("diff",),
    "diff_b": ("diff_b",),
    "diff_m": ("diff_m",),
}
# What fused.json and --json call the numbers of hits of each kind.
COUNTED: Mapping[Kind, str] = {"pair": "pairs", "diff": "diff", "diff_b": "diff_b", "diff_m": "diff_m"}


@dataclass(frozen=True, slots=True)
class Hit:
    """One delta on one base tensor. ``alpha`` is set for pairs, by ``faults``."""

    base_key: str
    module: Module
    kind: Kind
    alpha: Alpha | None = None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(self.module.parts[part] for part in PARTS[self.kind])

    def scale(self, strength: float) -> float:
        """strength * alpha / rank for a pair, the strength alone for a diff."""
        return strength * (self.alpha.ratio if self.alpha else 1.0)

    @property
    def delta_shape(self) -> tuple[int, ...]:
        """(out, in) of a pair, the tensor's own shape of a diff."""
        if self.kind == "pair":
            return (self.module.parts["up"].shape[0], *self.module.parts["down"].shape[1:])
        return self.tensors[0].shape


@dataclass(frozen=True, slots=True)
class Skip:
    """A module that stays unapplied, and the reason that makes this right."""

    module: Module
    reason: str


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A module with no home in the base; ``likely`` is the family's guess at why."""

    module: Module
    likely: str | None


@dataclass(frozen=True, slots=True)
class Matching:
    """The outcome for one LoRA on one component."""

    assignment: Assignment
    hits: tuple[Hit, ...]
    skipped: tuple[Skip, ...]
    unmatched: tuple[Unmatched, ...]
    faults: tuple[Fault, ...]
    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class NameTable:
    """A component's tensors by every name they go by: the base's ``own``, and the family's ``other`` ones."""

    own: Mapping[str, str]
    other: Mapping[str, str]
    flat_own: Mapping[str, tuple[str, ...]]
    flat_other: Mapping[str, tuple[str, ...]]

    def find(self, spelling: Spelling, leaf: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Base keys called this in the base's own layout, and in the other one."""
        if spelling.flat:
            flat = _flatten(spelling.name) + leaf
            return self.flat_own.get(flat, ()), self.flat_other.get(flat, ())
        name = spelling.name + leaf
        return _as_tuple(self.own.get(name)), _as_tuple(self.other.get(name))


def name_table(component: Component, family: Family | None, layout: Layout | None) -> NameTable:
    """All names of a component's tensors: its own, and those of the family's other layout."""
    own = {name: component.prefix + name for name in component.model_shapes()}
    other: dict[str, str] = {}
    if family and layout:
        opposite: Layout = "diffusers" if layout == "native" else "native"
        for name, base_key in own.items():
            translated = family.translate(name, opposite)
            if translated != name:
                other[translated] = base_key
    return NameTable(own, other, _flattened(own), _flattened(other))


def match(assignment: Assignment, family: Family | None, layout: Layout | None) -> Matching:
    """Find every module's tensors. Shapes are checked exactly; nothing is reshaped or broadcast."""
    table = name_table(assignment.component, family, layout)
    modules = _modules_for(assignment)
    same_layout = _votes(table, modules)
    search = _Search(assignment, table, same_layout)
    hits: list[Hit] = []
    faults: list[Fault] = []
    homeless: list[Module] = []
    for module in modules:
        found, wrong = search.module(module)
        hits += found
        faults += wrong
        if not found and not wrong and set(module.parts) != {"alpha"}:
            homeless.append(module)
    skipped, unmatched = _explain(homeless, assignment.component, family)
    faults += _shape_faults(assignment, hits) + _double_faults(assignment, hits)
    notices = tuple(_orphan_notices(assignment, modules))
    return Matching(assignment, tuple(hits), skipped, unmatched, tuple(faults), notices)


def module_glob(module: str, pattern: str) -> bool:
    """Whether a user's glob means this module, with or without its prefixes."""
    return any(fnmatchcase(spelling.name, pattern) for spelling in spellings(module))


def plain_name(module: str) -> str:
    """The module's name with every prefix off."""
    return spellings(module)[-1].name


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks one module up at a time; ``same_layout`` decides names that both layouts use."""

    assignment: Assignment
    table: NameTable
    same_layout: bool | None

    def module(self, module: Module) -> tuple[list[Hit], list[Fault]]:
        hits: list[Hit] = []
        faults: list[Fault] = []
        missing: list[Kind] = []
        for kind in _kinds(module):
            keys = self._base_keys(module, PARTS[kind][0])
            if len(keys) == 1:
                hits.append(Hit(keys[0], module, kind))
            elif keys:
                faults.append(self._fault("ambiguous", module, f"could be {' or '.join(keys)}"))
            else:
                missing.append(kind)
        if missing and (hits or self._weight_exists(module)):
            faults += [self._fault("no_target", module, _no_target(kind)) for kind in missing]
        return hits, faults

    def _base_keys(self, module: Module, part: Part) -> tuple[str, ...]:
        for leaf in LEAVES[part]:
            found = dict.fromkeys(
                key for spelling in spellings(module.name) for key in self._choose(spelling, leaf)
            )
            if found:
                return tuple(found)
        return ()

    def _choose(self, spelling: Spelling, leaf: str) -> tuple[str, ...]:
        own, other = self.table.find(spelling, leaf)
        if own and other and self.same_layout is not None:
            return own if self.same_layout else other
        return (*own, *other)

    def _weight_exists(self, module: Module) -> bool:
        return bool(self._base_keys(module, "up"))

    def _fault(self, kind: str, module: Module, what: str) -> Fault:
        name = module.name
        return Fault(kind, f"{name}: {what}", path=self.assignment.adapter.name, key=name)


def _no_target(kind: Kind) -> str:
    return {
        "pair": "the base has no weight to add the pair to",
        "diff": "the base has no weight to add the diff to",
        "diff_b": "the base has no bias to add the diff_b to",
        "diff_m": "the base has no modulation to add the diff_m to",
    }[kind]


def _kinds(module: Module) -> Iterator[Kind]:
    if module.is_pair:
        yield "pair"
    for kind in ("diff", "diff_b", "diff_m"):
        if kind in module.parts:
            yield kind


def _modules_for(assignment: Assignment) -> list[Module]:
    """The modules meant for this component: a file for both experts says with a prefix whose is which."""
    modules = assignment.adapter.modules
    owners = key_owners(assignment.adapter)
    if one_for_all(owners, assignment.component):
        return list(modules)
    return [m for m in modules if (named_component(m.name) or FIRST) == assignment.component.name]


def _votes(table: NameTable, modules: Sequence[Module]) -> bool | None:
    """Whether the LoRA is spelled as the base is, by names that one layout alone uses.

    None when no name tells, and when some say the one and some the other: a name that both layouts
    use is then ambiguous.
    """
    renamed = frozenset(table.other.values())
    same = different = False
    for module in modules:
        for spelling in spellings(module.name):
            for leaf in (".weight", ".bias"):
                own, other = table.find(spelling, leaf)
                same |= not other and not renamed.isdisjoint(own)
                different |= bool(other) and not own
    return None if same == different else same


def _explain(
    homeless: Sequence[Module], component: Component, family: Family | None
) -> tuple[tuple[Skip, ...], tuple[Unmatched, ...]]:
    """Sort modules without a home into the family's harmless ones and the rest."""
    if family is None:
        return (), tuple(Unmatched(module, None) for module in homeless)
    shapes = family.native_shapes(component.model_shapes())
    skipped, unmatched = [], []
    for module in homeless:
        rule = _skip_rule(module, family)
        if rule is not None and rule.harmless(shapes):
            skipped.append(Skip(module, rule.reason))
        else:
            unmatched.append(Unmatched(module, rule.reason if rule else None))
    return tuple(skipped), tuple(unmatched)


def _skip_rule(module: Module, family: Family) -> SkipRule | None:
    """The rule that speaks of a module, in whichever layout it is spelled."""
    readings = spellings(module.name)
    names = {name for s in readings for name in (s.name, family.translate(s.name, "native"))}
    flat = {_flatten(s.name) for s in readings if s.flat}
    for rule in family.skips:
        if any(map(rule.covers, names)) or any(map(rule.covers_flat, flat)):
            return rule
    return None


def _shape_faults(assignment: Assignment, hits: Sequence[Hit]) -> list[Fault]:
    tensors = assignment.component.tensors()
    return [fault for hit in hits if (fault := _shape_fault(assignment, hit, tensors[hit.base_key]))]


def _shape_fault(assignment: Assignment, hit: Hit, base: TensorInfo) -> Fault | None:
    name, path = hit.module.name, assignment.adapter.name
    if hit.kind == "pair":
        up, down = hit.tensors
        if up.shape[1:2] != down.shape[:1]:
            text = f"{name}: up {list(up.shape)} and down {list(down.shape)} disagree about the rank"
            return Fault("shape", text, path=path, key=name)
        if len(up.shape) != 2 or len(down.shape) != 2:
            text = f"{name}: a pair of shapes {list(up.shape)} and {list(down.shape)} is no linear pair"
            return Fault("unsupported", text, path=path, key=name)
    if base.dtype in FUSABLE and hit.delta_shape != base.shape:
        text = f"{name}: the delta is {list(hit.delta_shape)}, but {hit.base_key} is {list(base.shape)}"
        hint = "The LoRA was made for another size or variant of this model."
        return Fault("shape", text, path=path, key=name, hint=hint)
    return None


def _double_faults(assignment: Assignment, hits: Sequence[Hit]) -> list[Fault]:
    """One tensor meant twice in one file, by two spellings or two kinds of diff; pair and diff may meet."""
    seen: dict[tuple[str, bool], Hit] = {}
    faults = []
    for hit in hits:
        first = seen.setdefault((hit.base_key, hit.kind == "pair"), hit)
        if first is not hit:
            one, two = first.tensors[0].name, hit.tensors[0].name
            text = f"{hit.base_key} is meant twice, by {one} and by {two}"
            faults.append(Fault("twice", text, path=assignment.adapter.name, key=hit.module.name))
    return faults


def _orphan_notices(assignment: Assignment, modules: Sequence[Module]) -> Iterator[Notice]:
    orphans = [m.name for m in modules if "alpha" in m.parts and not m.is_pair]
    if orphans:
        text = f"{assignment.adapter.name}: {len(orphans)} alpha without a pair, such as {orphans[0]}"
        yield Notice("orphan_alpha", text, {"modules": orphans})


def _flatten(name: str) -> str:
    return name.replace(".", "_")


def _flattened(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Flattened stem plus leaf -> base keys; more than one where flattening makes two names alike."""
    table: dict[str, tuple[str, ...]] = {}
    for name, base_key in names.items():
        stem, dot, leaf = name.rpartition(".")
        flat = _flatten(stem) + dot + leaf
        table[flat] = (*table.get(flat, ()), base_key)
    return table


def _as_tuple(key: str | None) -> tuple[str, ...]:
    return () if key is None else (key,)
