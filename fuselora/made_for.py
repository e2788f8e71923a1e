"""What a LoRA was made for, told from its module names and delta shapes, and what it says. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fuselora.families.recognition import families_named, families_of
from fuselora.kinds import BadParts, Kind
from fuselora.lora.grammar import UNFUSED, parse_key, spellings
from fuselora.targets import named_component
from fuselora.text_encoders import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fuselora.checkpoint import Checkpoint
    from fuselora.families import Family, Kin
    from fuselora.lora.adapter import Adapter, Module

UNFUSED_ENDING = re.compile(f"(?:{'|'.join(suffix for _, suffix in UNFUSED)})$")
SHOWN = 3  # models of one family, in a hint


@dataclass(frozen=True, slots=True)
class Names:
    """A LoRA's module names as a family reads them: prefix off, dots in place."""

    family: Family | None

    def plain(self, module: str) -> str:
        reading = spellings(module)[-1]
        dotted = self.family.dotted(reading.name) if reading.flat and self.family else None
        return dotted or reading.name

    def deltas(self, adapter: Adapter) -> dict[str, tuple[int, ...]]:
        """The base tensors that the LoRA speaks of and the shape of each delta, () where it has none."""
        found: dict[str, tuple[int, ...]] = {}
        for module in _of_models(adapter):
            name = self.plain(module.name)
            if not module.kinds:  # an alpha alone
                found.setdefault(name + ".weight", ())
            for kind in module.kinds:
                found |= dict.fromkeys((name + leaf for leaf in kind.leaves), delta_shape(kind, module))
        for key in unread_keys(adapter):
            found.setdefault(self.plain(UNFUSED_ENDING.sub("", key)) + ".weight", ())
        return found


@dataclass(frozen=True, slots=True)
class Candidate:
    """A family that has as many of a LoRA's names as any.

    ``kin`` are its models with room for all deltas; ``n_blocks`` is one more than the last block that the
    LoRA changes. ``is_whole``: it changes every block of one of these models. ``is_stated``: it says itself
    that it is for this family.
    """

    family: Family
    kin: tuple[Kin, ...]
    n_blocks: int
    is_whole: bool
    is_stated: bool

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        return self.is_stated, self.is_whole, bool(self.kin)

    def of_its_blocks(self) -> Candidate:
        """The same, of the models that have just as many blocks."""
        return replace(self, kin=tuple(one for one in self.kin if one.blocks == self.n_blocks))


def candidates(adapter: Adapter) -> tuple[Candidate, ...]:
    """The likeliest first."""
    stated = stated_families(adapter)
    families = families_of(_readings(adapter))
    found = [_candidate(family, adapter, is_stated=family in stated) for family in families]
    return tuple(sorted(found, key=lambda one: one.rank, reverse=True))


def stated_families(adapter: Adapter) -> tuple[Family, ...]:
    """Of the model that it says it was trained on."""
    return tuple(family for text in adapter.trained_on.values() for family in families_named(text))


def names_for(adapter: Adapter) -> tuple[Names, ...]:
    """As each candidate reads them; as none does where no family has most of the names."""
    return tuple(Names(one.family) for one in candidates(adapter)) or (Names(None),)


def _candidate(family: Family, adapter: Adapter, *, is_stated: bool) -> Candidate:
    canonical = family.canonical_shapes(Names(family).deltas(adapter))
    kin, blocks = family.kin_of_deltas(canonical), family.block_numbers(canonical)
    is_whole = family.blocks_alike and any(one.blocks == len(blocks) for one in kin)
    return Candidate(family, kin, max(blocks, default=-1) + 1, is_whole, is_stated)


def _of_models(adapter: Adapter) -> Iterator[Module]:
    """Its modules but for those whose prefix says that they are a text encoder's."""
    return (module for module in adapter.modules if named_component(module.name) not in MEANINGS)


def _readings(adapter: Adapter) -> Iterator[str]:
    """All modules' names, prefix off, flattened ones as they are."""
    modules = (module.name for module in _of_models(adapter))
    unread = (UNFUSED_ENDING.sub("", key) for key in unread_keys(adapter))
    return (spellings(name)[-1].name for name in (*modules, *unread))


# Beside a base ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """The families that a LoRA is for, of which the base's is none, and what tells. ``models``: of each."""

    families: tuple[str, ...]
    models: tuple[tuple[str, ...], ...]
    evidence: str

    @property
    def named(self) -> str:
        """The families, each with a few models that have room for the LoRA."""
        return " or ".join(map(_with_models, self.families, self.models))


def other_family(adapter: Adapter, checkpoint: Checkpoint) -> Origin | None:
    """What a LoRA is for, if that is another family than the base's.

    What it says itself counts first, then the share of its names, then its sizes, then that it changes every
    block of a published model and only some of the base's. Families that fit it as well as the base's are no
    evidence.
    """
    base, stated = checkpoint.family, stated_families(adapter)
    if base is None or base in stated:
        return None
    if stated:
        key, text = next((key, text) for key, text in adapter.trained_on.items() if families_named(text))
        names = tuple(dict.fromkeys(family.name for family in stated))
        return Origin(names, ((),) * len(names), f"as its {key} says: {_short(text)}")
    found = candidates(adapter)
    own = next((one for one in found if one.family is base), None)
    if own is None:
        how = "by its names and shapes" if found and found[0].kin else "by its names"
        return _origin([one for one in found if one.rank == found[0].rank], how)
    if not own.kin and checkpoint.models:
        return _origin([one for one in found if one.kin], "by its names and shapes")
    whole = [one.of_its_blocks() for one in found if one.is_whole]
    if not whole or own.is_whole or own.n_blocks == _blocks_of(checkpoint):
        return None
    return _origin(whole, f"all {whole[0].n_blocks} of whose blocks it changes")


def made_for(adapter: Adapter, checkpoint: Checkpoint) -> str:
    """The models that a LoRA is for, in a sentence.

    Empty where no family has the names, and where the base's models are among them.
    """
    if origin := other_family(adapter, checkpoint):
        base = checkpoint.family.name if checkpoint.family else "of no known family"
        return f"The LoRA is for {origin.named}, {origin.evidence}; the base is {base}. "
    models = [model for one in candidates(adapter) for model in models_named(one.kin, 1)]
    if not models or not {_bare(model) for model in checkpoint.models}.isdisjoint(map(_bare, models)):
        return ""
    base = f", and the base is {' or '.join(checkpoint.models)}" if checkpoint.models else ""
    return f"By its names and shapes the LoRA is for {' or '.join(models)}{base}. "


def _origin(found: Sequence[Candidate], evidence: str) -> Origin | None:
    if not found:
        return None
    models = tuple(models_named(one.kin, 1) for one in found)
    return Origin(tuple(one.family.name for one in found), models, evidence)


def _with_models(family: str, models: Sequence[str]) -> str:
    more = ["..."] if len(models) > SHOWN else []
    return f"{family} ({', '.join([*models[:SHOWN], *more])})" if models else family


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"...{text[-77:]}")


def _blocks_of(checkpoint: Checkpoint) -> int:
    """How many blocks the base has."""
    family, model = checkpoint.family, checkpoint.transformers[0]
    if family is None:
        return 0
    shapes = family.canonical_shapes(model.model_shapes(), checkpoint.layout)
    return max(family.block_numbers(shapes), default=-1) + 1


def unread_keys(adapter: Adapter) -> Iterator[str]:
    """Keys of kinds that are not fused yet, and keys that nobody knows."""
    return (tensor.name for tensor in adapter.tensors if parse_key(tensor.name) is None)


def delta_shape(kind: Kind, module: Module) -> tuple[int, ...]:
    """Of the module's delta; () where it has none, or the base's is needed to tell."""
    if kind.lacks(module.parts):
        return ()
    try:
        return kind.shape(module.shapes, ())
    except BadParts:
        return ()


def _bare(model: str) -> str:
    return model.partition(" (")[0]


def models_named(kin: Iterable[Kin], n_experts: int) -> tuple[str, ...]:
    """As they are published, of those with so many experts."""
    return tuple(model for one in kin for model in one.named(n_experts))
