"""What a LoRA was made for, told from its module names and delta shapes alone. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fuselora.description import Target
from fuselora.families.recognition import families_of
from fuselora.kinds import BadParts, Kind
from fuselora.lora.grammar import UNFUSED, parse_key, spellings
from fuselora.targets import key_owners

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from fuselora.families import Family, Kin
    from fuselora.lora.adapter import Adapter, Module

UNFUSED_ENDING = re.compile(f"(?:{'|'.join(suffix for _, suffix in UNFUSED)})$")


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
        for module in adapter.modules:
            name = self.plain(module.name)
            if not module.kinds:  # an alpha alone
                found.setdefault(name + ".weight", ())
            for kind in module.kinds:
                found |= dict.fromkeys((name + leaf for leaf in kind.leaves), delta_shape(kind, module))
        for key in unread_keys(adapter):
            found.setdefault(self.plain(UNFUSED_ENDING.sub("", key)) + ".weight", ())
        return found


def names_for(adapter: Adapter) -> tuple[Names, ...]:
    """As the families read them that have most of the names, those first that have room for the deltas.

    As none reads them where no family has most of them.
    """
    found = sorted(families_of(_readings(adapter)), key=lambda family: not _kin(family, adapter))
    return tuple(map(Names, found)) or (Names(None),)


def _readings(adapter: Adapter) -> Iterator[str]:
    """All modules' names, prefix off, flattened ones as they are."""
    modules = (module.name for module in adapter.modules)
    unread = (UNFUSED_ENDING.sub("", key) for key in unread_keys(adapter))
    return (spellings(name)[-1].name for name in (*modules, *unread))


def target_of(adapter: Adapter) -> Target:
    """What ``inspect`` says of a LoRA."""
    first, *others = names_for(adapter)
    family = first.family
    if family is None:
        return Target()
    deltas = first.deltas(adapter)
    canonical = family.canonical_shapes(deltas)
    kin = family.kin_of_deltas(canonical)
    models = partial(_models, n_experts=2 if "transformer_2" in key_owners(adapter) else 1)
    parts = {rule.reason: models(family.kin_but_for(rule, canonical)) for rule in family.skips}
    elsewhere = {names.family.name: models(_kin(names.family, adapter)) for names in others if names.family}
    sizes = {measure.name: tuple(sorted(measure.of(canonical))) for measure in family.measures}
    n_blocks = {one.blocks for one in kin}
    return Target(
        family=family.name,
        layout=family.layout_of(deltas),
        models=models(kin),
        also={reason: found for reason, found in parts.items() if found},
        others={name: found for name, found in elsewhere.items() if found},
        sizes={name: found for name, found in sizes.items() if found},
        branches={branch.name: branch.is_in(canonical) for branch in family.branches},
        blocks=tuple(sorted(family.block_numbers(canonical))),
        n_blocks=n_blocks.pop() if len(n_blocks) == 1 else None,
    )


def made_for(adapter: Adapter, base: Collection[str]) -> str:
    """The models that a LoRA's names and shapes are those of, in a sentence.

    Empty where no family has the names, and where the models ``base`` are among them.
    """
    target = target_of(adapter)
    models = [*target.models, *(model for found in target.others.values() for model in found)]
    if target.family is None or not {_bare(model) for model in base}.isdisjoint(map(_bare, models)):
        return ""
    found = " or ".join(models) or f"no published model of the family {target.family}"
    return f"By its names and shapes the LoRA is for {found}. "


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


def _kin(family: Family, adapter: Adapter) -> tuple[Kin, ...]:
    return family.kin_of_deltas(family.canonical_shapes(Names(family).deltas(adapter)))


def _models(kin: Iterable[Kin], n_experts: int) -> tuple[str, ...]:
    return tuple(model for one in kin for model in one.named(n_experts))
