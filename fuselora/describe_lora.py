"""What a LoRA is, for ``fuselora inspect``. Headers and small reads only; no torch."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from fuselora.description import (
    LoraDescription,
    Scale,
    Target,
)
from fuselora.errors import Fault
from fuselora.header import dtypes_of
from fuselora.kinds import KINDS
from fuselora.kinds.kind import ALPHAS, has_kernel
from fuselora.lora.adapter import component_of, open_adapter
from fuselora.lora.config import config_of_metadata
from fuselora.lora.grammar import parse_key, spellings, unfused_kind
from fuselora.lora.sampling import sampling_of
from fuselora.lora.scale import BadNumber, resolve_alpha
from fuselora.made_for import Names, candidates, delta_shape, models_named, names_for, unread_keys
from fuselora.match import plain_name
from fuselora.reading import named_path
from fuselora.resolve import resolve_lora
from fuselora.serving_notes import notes_of
from fuselora.specs import LoraSpec
from fuselora.targets import expert_in_name, key_owners

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fuselora.lora.adapter import Adapter, Module
    from fuselora.lora.scale import Alpha

BLOCK_NUMBER = re.compile(r"(?<![^._])[0-9]+(?=[._])")


def describe_lora(path: Path) -> LoraDescription:
    """Of a file, an index or an adapter folder. Raises ``InputError``."""
    adapter = open_adapter(resolve_lora(LoraSpec(str(path))))
    location, tensors = adapter.location, adapter.tensors
    names = names_for(adapter)[0]
    scales, alpha_faults = _scales(adapter)
    parsed = [key for tensor in tensors if (key := parse_key(tensor.name))]
    unfused = Counter(kind for key in unread_keys(adapter) if (kind := unfused_kind(key)))
    said = (expert_in_name(name) for name in (adapter.name, named_path(path).name))
    sampling = sampling_of(adapter, names.family)
    return LoraDescription(
        path=path,
        file=adapter.name,
        config=location.config.name if location.config else None,
        target=target_of(adapter),
        dialects=Counter(module.dialect for module in adapter.modules),
        adapter_names=tuple(sorted({key.name for key in parsed if key.name})),
        prefixes=Counter(_prefix(module) for module in adapter.modules),
        flattened=any(spellings(module.name)[-1].flat for module in adapter.modules),
        kinds=_kinds(adapter),
        places=Counter(_place(module, names) for module in adapter.modules),
        ranks=Counter(rank for _, rank in _ranked(adapter)),
        scales=scales,
        dtypes=dtypes_of(tensors),
        n_tensors=len(tensors),
        n_bytes=adapter.n_bytes,
        named_experts=tuple(sorted({name for name in said if name})),
        named_components=tuple(sorted(key_owners(adapter))),
        metadata=adapter.metadata,
        unfused=unfused,
        faults=(*adapter.faults, *alpha_faults),
        serving=notes_of(sampling),
        published_alpha=sampling.alpha,
    )


def target_of(adapter: Adapter) -> Target:
    """What ``inspect`` says of a LoRA."""
    found = candidates(adapter)
    if not found:
        return Target(trained_on=adapter.trained_on)
    first, *others = found
    family, kin = first.family, first.kin
    deltas = Names(family).deltas(adapter)
    canonical = family.canonical_shapes(deltas)
    models = partial(models_named, n_experts=2 if "transformer_2" in key_owners(adapter) else 1)
    parts = {rule.reason: models(family.kin_but_for(rule, canonical)) for rule in family.skips}
    sizes = {measure.name: tuple(sorted(measure.of(canonical))) for measure in family.measures}
    n_blocks = {one.blocks for one in kin}
    return Target(
        family=family.name,
        families=tuple(one.family.name for one in found if one.rank == first.rank),
        layout=family.layout_of(deltas),
        models=models(kin),
        also={reason: found for reason, found in parts.items() if found},
        others={one.family.name: models(one.kin) for one in others if one.kin},
        sizes={name: found for name, found in sizes.items() if found},
        branches={branch.name: branch.is_in(canonical) for branch in family.branches},
        blocks=tuple(sorted(family.block_numbers(canonical))),
        n_blocks=n_blocks.pop() if len(n_blocks) == 1 else None,
        trained_on=adapter.trained_on,
    )


def _ranked(adapter: Adapter) -> Iterator[tuple[Module, int]]:
    """Modules that alpha / rank scales; those without a rank are among the faults."""
    for module in adapter.modules:
        if module.rank and all(delta_shape(kind, module) for kind in module.kinds if kind.scaled):
            yield module, module.rank


def _kinds(adapter: Adapter) -> dict[str, int]:
    """How many modules have what; one with a pair and a bias difference counts twice."""
    modules = adapter.modules
    with_alpha = [m for m in modules if not ALPHAS.isdisjoint(m.parts)]
    whole = [kind for m in modules for kind in m.kinds if not kind.lacks(m.parts)]
    counts = Counter(kind.counted for kind in whole)
    return {
        **{name: counts[name] for name in dict.fromkeys(kind.counted for kind in KINDS)},
        "alpha": len(with_alpha),
        "orphan_alpha": sum(not any(k.uses_alpha for k in m.kinds) for m in with_alpha),
        "half_pairs": sum(any(k.lacks(m.parts) for k in m.kinds) for m in modules),
    }


def _place(module: Module, names: Names) -> str:
    """A diff_m's module is the whole block, so its place is named after the tensor."""
    leaf = ".modulation" if set(module.parts) == {"diff_m"} else ""
    return BLOCK_NUMBER.sub("*", names.plain(module.name) + leaf, count=1)


def _prefix(module: Module) -> str:
    return module.name.removesuffix(plain_name(module.name))


def _scales(adapter: Adapter) -> tuple[tuple[Scale, ...], tuple[Fault, ...]]:
    """Every pair's alpha by the order of sources, strength and ``--alpha`` aside; alike ones counted."""
    groups: Counter[tuple[Alpha, int]] = Counter()
    for module, rank in _ranked(adapter):
        if not ALPHAS.isdisjoint(module.parts) and module.alpha is None and module.alpha_scale is None:
            continue  # its fault says why
        try:
            groups[_alpha(adapter, module, rank), rank] += 1
        except BadNumber as error:
            text = f"the file's metadata: {error}"
            return (), (Fault("alpha", text, path=adapter.name, key="__metadata__"),)
    found = [
        Scale(alpha.value, rank, alpha.ratio, alpha.source, count) for (alpha, rank), count in groups.items()
    ]
    return tuple(sorted(found, key=lambda scale: (scale.alpha, scale.rank, scale.source))), ()


def _alpha(adapter: Adapter, module: Module, rank: int) -> Alpha:
    conv = any(has_kernel(delta_shape(kind, module)) for kind in module.kinds)
    return resolve_alpha(
        plain_name(module.name),
        rank,
        stored=adapter.stored_alpha(module, rank, conv=conv),
        option=None,
        config=adapter.config,
        metadata=lambda: config_of_metadata(adapter.metadata, component_of(module.name)),
        conv=conv,
    )
