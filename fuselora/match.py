"""Modules of a LoRA x tensors of a component -> hits: which delta goes onto which base tensor.

Every LoRA tensor ends in a hit, a skip, or among the unmatched; ``faults`` decides what the rest mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product

from fuselora.checkpoint import Component
from fuselora.errors import Fault, Notice
from fuselora.families import Family, Layout, SkipRule
from fuselora.header import TensorInfo
from fuselora.kinds import BadParts, Kind, Part, fits
from fuselora.kinds.dora import check_magnitude
from fuselora.kinds.experts import PAIR, PARTS, fits_parameter, of_parameter
from fuselora.kinds.kind import ALPHAS, MAGNITUDES
from fuselora.kinds.settings import owner
from fuselora.lora.adapter import Module
from fuselora.lora.grammar import Spelling, spellings
from fuselora.lora.scale import Alpha
from fuselora.targets import Assignment, named_component
from fuselora.text_encoders import MEANINGS, ties_head

FUSABLE = frozenset({"F32", "BF16", "F16"})
# transformers has had CLIPTextModel with and without text_model, Qwen with and without language_model
LEVELS = re.compile(r"^(?:(?:text_model|language_model|model)[._])+")
HEAD = re.compile(r"(?:^|[._])lm_head$")
TIED = "the head is tied to the embedding (tie_word_embeddings in config.json): it has no weight of its own"


@dataclass(frozen=True, slots=True)
class Hit:
    """One delta on one base tensor.

    ``alpha`` is set by ``faults``, for kinds that have a rank; ``block`` is the factor of ``--blocks``.
    """

    base_key: str
    module: Module
    kind: Kind
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
        """What alpha is divided by; None where none counts."""
        stated = round(self.alpha.divisor) if self.alpha else None
        return self.own_rank or stated

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
    """A module that stays unapplied, and why that is right. ``asked``: the user wants it so."""

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
    """The outcome for one LoRA on one component."""

    assignment: Assignment
    hits: tuple[Hit, ...]
    skipped: tuple[Skip, ...]
    unmatched: tuple[Unmatched, ...]
    faults: tuple[Fault, ...]
    notices: tuple[Notice, ...]


@dataclass(frozen=True, slots=True)
class NameTable:
    """A component's tensors by every name they go by: the base's ``own``, and the family's ``other`` ones.

    ``bare`` and ``flat_bare`` are a text encoder's names without the levels that some versions have.
    """

    own: Mapping[str, str]
    other: Mapping[str, str]
    flat_own: Mapping[str, tuple[str, ...]]
    flat_other: Mapping[str, tuple[str, ...]]
    bare: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flat_bare: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def find(self, spelling: Spelling, leaf: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Base keys called this in the base's own layout, and in the other one."""
        if spelling.flat:
            flat = _flatten(spelling.name) + leaf
            return self.flat_own.get(flat, ()), self.flat_other.get(flat, ())
        name = spelling.name + leaf
        return _as_tuple(self.own.get(name)), _as_tuple(self.other.get(name))

    def find_bare(self, spelling: Spelling, leaf: str) -> tuple[str, ...]:
        """Base keys called this but for levels that only one of the two has."""
        name = without_levels(spelling.name)
        if spelling.flat:
            return self.flat_bare.get(_flatten(name) + leaf, ())
        return self.bare.get(name + leaf, ())


def name_table(component: Component, family: Family | None, layout: Layout | None) -> NameTable:
    """All names of a component's tensors: its own, and those of the family's other layout."""
    own = {name: component.prefix + name for name in component.model_shapes()}
    if component.is_text_encoder:
        return NameTable(own, {}, _flattened(own), {}, *_without_levels(own))
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
    family = None if assignment.component.is_text_encoder else family
    table = name_table(assignment.component, family, layout)
    modules = assignment.modules
    same_layout = _votes(table, assignment)
    search = _Search(assignment, table, same_layout, assignment.component.tensors())
    hits: list[Hit] = []
    faults: list[Fault] = []
    homeless: list[Module] = []
    for module in modules:
        found, wrong = search.module(module)
        hits += found
        faults += wrong
        if not found and not wrong and not module.parts.keys() <= ALPHAS:
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
    shapes: Mapping[str, TensorInfo]

    def module(self, module: Module) -> tuple[list[Hit], list[Fault]]:
        if self._is_tied_head(module):
            return [], [self._fault("tied", module, TIED, "Leave its keys out of the file.")]
        if module.parts.keys() >= PAIR and (named := self._parameters(module)):
            return self._on_parameter(module, named)
        hits: list[Hit] = []
        faults: list[Fault] = []
        missing: list[Kind] = []
        for kind in module.kinds:
            if kind.lacks(module.parts):
                continue  # the adapter has said so
            keys = self._base_keys(module, kind.leaves)
            if len(keys) == 1:
                if kind.applies(module.settings, module.shapes, self.shapes[keys[0]].shape):
                    hits.append(Hit(keys[0], module, kind))
            elif keys:
                faults.append(self._fault("ambiguous", module, f"could be {' or '.join(keys)}"))
            elif not kind.if_there:
                missing.append(kind)
        if missing and (hits or self._weight_exists(module)):
            faults += [
                self._fault("no_target", module, f"the base has no {kind.home} to add the {kind.name} to")
                for kind in missing
            ]
        return hits, faults

    def _parameters(self, module: Module) -> dict[str, Module]:
        """Base keys that the configuration's targets can mean, and the module named after each."""
        name = owner(module.name)
        named = [replace(module, name=name + leaf) for leaf in module.settings.parameters]
        return {key: found for found in named for key in self._base_keys(found, ("",))}

    def _on_parameter(self, module: Module, keys: Mapping[str, Module]) -> tuple[list[Hit], list[Fault]]:
        """PEFT's key does not say which parameter is meant: the only one, or the only one that fits."""
        if extra := sorted(module.parts.keys() - PARTS):
            text = f"{' and '.join(extra)} beside a pair of a parameter (target_parameters)"
            return [], [self._fault("unsupported", module, f"{text} is not fused")]
        shapes = {key: self.shapes[key].shape for key in keys}
        fitting = [key for key, shape in shapes.items() if fits_parameter(module.shapes, shape)]
        if len(keys) > 1 and len(fitting) != 1:
            listed = " or ".join(f"{key} {list(shapes[key])}" for key in fitting or keys)
            text = f"its shapes do not tell whether it is for {listed}"
            return [], [self._fault("ambiguous", module, text)]
        (key,) = fitting if fitting else keys
        found = of_parameter(keys[key].settings, module.shapes, shapes[key])
        meant = replace(keys[key], settings=found)
        return [Hit(key, meant, kind) for kind in meant.kinds], []

    def _base_keys(self, module: Module, leaves: Sequence[str]) -> tuple[str, ...]:
        readings = _readings(module, self.assignment.component)
        for leaf, find in product(leaves, (self._choose, self.table.find_bare)):
            found = dict.fromkeys(key for reading in readings for key in find(reading, leaf))
            if found:
                return tuple(found)
        return ()

    def _is_tied_head(self, module: Module) -> bool:
        is_head = HEAD.search(plain_name(module.name)) is not None
        return is_head and ties_head(self.assignment.component.config)

    def _choose(self, spelling: Spelling, leaf: str) -> tuple[str, ...]:
        own, other = self.table.find(spelling, leaf)
        if own and other and self.same_layout is not None:
            return own if self.same_layout else other
        return (*own, *other)

    def _weight_exists(self, module: Module) -> bool:
        return bool(self._base_keys(module, (".weight",)))

    def _fault(self, kind: str, module: Module, what: str, hint: str | None = None) -> Fault:
        name = module.name
        return Fault(kind, f"{name}: {what}", path=self.assignment.adapter.name, key=name, hint=hint)


def without_levels(name: str) -> str:
    """A text encoder's name without the levels that some versions of its class have around the model."""
    return LEVELS.sub("", name)


def _without_levels(
    own: Mapping[str, str],
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Names without those levels -> base keys, dotted and flattened."""
    bare: dict[str, tuple[str, ...]] = {}
    flat: dict[str, tuple[str, ...]] = {}
    for name, base_key in own.items():
        short = without_levels(name)
        bare[short] = (*bare.get(short, ()), base_key)
        for flattened in _flattened({short: base_key}):
            flat[flattened] = (*flat.get(flattened, ()), base_key)
    return bare, flat


def _readings(module: Module, component: Component) -> tuple[Spelling, ...]:
    """How a module's name can be read; where its prefix names a text encoder, for no other model."""
    readings = spellings(module.name)
    if component.is_text_encoder:
        return readings
    return tuple(reading for reading in readings if reading.component not in MEANINGS)


def _votes(table: NameTable, assignment: Assignment) -> bool | None:
    """Whether the LoRA is spelled as the base is, by names that one layout alone uses.

    None when no name tells, and when some say the one and some the other: a name that both layouts
    use is then ambiguous.
    """
    renamed = frozenset(table.other.values())
    same = different = False
    for module in assignment.modules:
        for spelling in _readings(module, assignment.component):
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
        return (), tuple(Unmatched(module, _for_encoder(module, component)) for module in homeless)
    shapes = family.native_shapes(component.model_shapes())
    skipped, unmatched = [], []
    for module in homeless:
        rule = _skip_rule(module, family)
        if rule is not None and rule.harmless(shapes):
            skipped.append(Skip(module, rule.reason))
        else:
            unmatched.append(Unmatched(module, rule.reason if rule else _for_encoder(module, component)))
    return tuple(skipped), tuple(unmatched)


def _for_encoder(module: Module, component: Component) -> str | None:
    """Why keys of a text encoder have no home in a transformer."""
    named = named_component(module.name)
    if component.is_text_encoder or named not in MEANINGS:
        return None
    return f"it is for the text encoder {named}, which this base does not have"


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
    if hit.module.reshape not in (None, base.shape) and hit.kind.home == "weight":
        wider = f"from {list(base.shape)} to {list(hit.module.reshape or ())} (reshape_weight)"
        text = f"{name}: widens {hit.base_key} {wider}, which fuselora does not do yet"
        return Fault("unsupported", text, path=path, key=name)
    try:
        shape = hit.kind.shape(hit.module.shapes, base.shape)
        check_magnitude(hit.kind, hit.module.shapes, base.shape)
        hit.kind.asks(hit.module.settings, hit.module.shapes, base.shape)
    except BadParts as error:
        return Fault(error.code, f"{name}: {error}", path=path, key=name)
    if base.dtype in FUSABLE and not fits(shape, base.shape):
        text = f"{name}: the delta is {list(shape)}, but {hit.base_key} is {list(base.shape)}"
        hint = "The LoRA was made for another size or variant of this model."
        return Fault("shape", text, path=path, key=name, hint=hint)
    return None


def _double_faults(assignment: Assignment, hits: Sequence[Hit]) -> list[Fault]:
    """One tensor meant twice in one file, by two spellings or two kinds of diff; pair and diff may meet."""
    seen: dict[tuple[str, bool], Hit] = {}
    faults = []
    for hit in hits:
        first = seen.setdefault((hit.base_key, hit.kind.scaled), hit)
        if first is not hit:
            one, two = first.tensors[0].name, hit.tensors[0].name
            text = f"{hit.base_key} is meant twice, by {one} and by {two}"
            faults.append(Fault("twice", text, path=assignment.adapter.name, key=hit.module.name))
    return faults


def _orphan_notices(assignment: Assignment, modules: Sequence[Module]) -> Iterator[Notice]:
    held = [m for m in modules if not ALPHAS.isdisjoint(m.parts)]
    orphans = [m.name for m in held if not any(k.uses_alpha for k in m.kinds)]
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
