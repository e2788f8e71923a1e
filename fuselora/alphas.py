"""The alpha of every hit, by the order of sources, and what is said of alphas and of ranks. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from fuselora.errors import Fault, Notice
from fuselora.file_options import misdirected
from fuselora.kinds.kind import has_kernel
from fuselora.lora.config import PEFT_ALPHA, SAME_ALPHA, AdapterConfig, config_of_metadata
from fuselora.lora.config_faults import REPAIR
from fuselora.lora.sampling import sampling_of
from fuselora.lora.scale import BadNumber, resolve_alpha
from fuselora.match import Hit, Matching, plain_name
from fuselora.plural import many
from fuselora.targets import named_component

if TYPE_CHECKING:
    from fuselora.families import Family
    from fuselora.specs import AlphaSpec


def with_alphas(matching: Matching, option: AlphaSpec | None) -> tuple[Matching, list[Fault]]:
    """Every pair's alpha, by the order of sources; ``option`` is the ``--alpha`` for this LoRA."""
    adapter, component = matching.assignment.adapter, matching.assignment.component.name
    metadata = cache(lambda part: config_of_metadata(adapter.metadata, part))
    shapes = {name: tensor.shape for name, tensor in matching.assignment.component.tensors().items()}
    hits: list[Hit] = []
    for hit in matching.hits:
        rank = hit.rank or _stated_rank(hit, adapter.config)
        if rank is None:
            hits.append(hit)
            continue
        conv = has_kernel(shapes[hit.base_key]) and not hit.module.settings.experts
        try:
            alpha = resolve_alpha(
                plain_name(hit.module.name),
                rank,
                stored=adapter.stored_alpha(hit.module, rank, conv=conv),
                option=option.alpha if option else None,
                config=adapter.config,
                metadata=partial(metadata, _part_of(matching, hit) or component),
                conv=conv,
            )
        except BadNumber as error:
            text = f"the file's metadata: {error}"
            return matching, [Fault("alpha", text, path=adapter.name, key="__metadata__")]
        hits.append(replace(hit, alpha=alpha))
    return replace(matching, hits=tuple(hits)), []


def unused_alphas(
    matchings: Sequence[Matching], options: Sequence[AlphaSpec], taken: Mapping[str, AlphaSpec]
) -> Iterator[Fault]:
    """Options that name no LoRA or several, or whose LoRAs, by ``taken``, take none."""
    locations = [matching.assignment.adapter.location for matching in matchings]
    wrong = list(misdirected(locations, options, "--alpha"))
    yield from wrong
    for option in options if not wrong else ():
        takers = [m for m in matchings if taken.get(m.assignment.adapter.location.spec.source) == option]
        used = any(hit.alpha and hit.alpha.source == "option" for m in takers for hit in m.hits)
        if not used and not any(m.faults for m in takers):
            target = f" for {option.source}" if option.source else ""
            text = f"--alpha {option.alpha:g}{target} applies to no module"
            yield Fault("unused_alpha", text, hint="Every module stores its own alpha.")


def expert_rank_faults(matching: Matching) -> Iterator[Fault]:
    """Ranks that only the base's number of experts tells, against the configuration.

    What shows its rank without the base is compared where the adapter is read.
    """
    adapter, in_metadata = matching.assignment.adapter, _metadata_configs(matching)
    where = adapter.location.config.name if adapter.location.config else "lora_adapter_metadata"
    for hit in matching.hits:
        name, rank = plain_name(hit.module.name), hit.own_rank
        config = (adapter.config or in_metadata(hit)) if hit.of_parameter else None
        said = config.rank_of(name) if config else None
        if rank and said and rank != said:
            text = f"{where}: says rank {said} for {name}, and its factors have {rank}"
            yield Fault("config", text, path=adapter.name, key=name, hint=REPAIR)


def alpha_notices(matching: Matching, family: Family | None) -> Iterator[Notice]:
    """What the user should know of where a LoRA's alphas are from."""
    yield from _metadata_notices(matching)
    yield from _full_factor_notices(matching)
    yield from _default_alpha_notices(matching)
    yield from _published_alphas(matching, family)


def _metadata_notices(matching: Matching) -> Iterator[Notice]:
    """Alpha tensors win over metadata; the user hears of it when the two disagree."""
    name, in_metadata = matching.assignment.adapter.name, _metadata_configs(matching)
    stored = [hit for hit in matching.hits if hit.alpha and hit.alpha.source in ("tensor", "rs_lora")]
    odd: dict[float, set[float]] = {}
    for hit in stored:
        config = in_metadata(hit)
        if config and hit.alpha and not _agrees(config, hit, conv=has_kernel(hit.shape)):
            odd.setdefault(config.lora_alpha, set()).add(hit.alpha.value)
    for said, alphas in odd.items():
        values = ", ".join(f"{alpha:g}" for alpha in sorted(alphas))
        text = f"{name}: its metadata says alpha {said:g}, its tensors say {values}; the tensors count"
        yield Notice("metadata_disagrees", text, {"lora": name, "metadata": said})


def _agrees(config: AdapterConfig, hit: Hit, *, conv: bool) -> bool:
    """Whether metadata alone would scale a module as its own alpha does."""
    alpha = config.alpha_of(plain_name(hit.module.name), conv=conv)
    wanted = alpha / config.divisor(hit.rank) if hit.rank else hit.ratio
    return math.isclose(hit.ratio, wanted, rel_tol=SAME_ALPHA)


def _metadata_configs(matching: Matching) -> Callable[[Hit], AdapterConfig | None]:
    """The metadata's configuration of the component, or the text encoder in its file, that a hit is on."""
    metadata, component = matching.assignment.adapter.metadata, matching.assignment.component.name
    read = cache(lambda part: _quiet_config(metadata, part))
    return lambda hit: read(_part_of(matching, hit) or component)


def _quiet_config(metadata: Mapping[str, str], component: str) -> AdapterConfig | None:
    try:
        return config_of_metadata(metadata, component)
    except BadNumber:
        return None


def _full_factor_notices(matching: Matching) -> Iterator[Notice]:
    """Whose definition scales LoKr modules with both factors full, where an alpha could have counted."""
    name = matching.assignment.adapter.name
    full = [hit for hit in matching.hits if hit.kind.scaled and hit.own_rank is None]
    peft = sum(hit.alpha is not None for hit in full)
    lycoris = sum(hit.alpha is None and hit.module.alpha is not None for hit in full)
    for whose, n_modules, rule in (
        ("PEFT", peft, "alpha / r of its configuration counts"),
        ("LyCORIS", lycoris, "no alpha counts"),
    ):
        if n_modules:
            what = f"{many(n_modules, 'module')} with both factors full and so no rank"
            text = f"{name}: {what}: as {whose} defines it, {rule}"
            yield Notice("full_factors", text, {"lora": name, "modules": n_modules, "as": whose})


def _default_alpha_notices(matching: Matching) -> Iterator[Notice]:
    """A configuration that leaves alpha out means PEFT's, as PEFT loads it."""
    adapter, in_metadata = matching.assignment.adapter, _metadata_configs(matching)
    used = [hit for hit in matching.hits if hit.alpha and hit.alpha.source in ("adapter_config", "metadata")]
    configs = (adapter.config or in_metadata(hit) for hit in used)
    if any(config and config.by_default for config in configs):
        text = f"{adapter.name}: its configuration gives no alpha, so PEFT's default counts: {PEFT_ALPHA:g}"
        yield Notice("default_alpha", text, {"lora": adapter.name, "alpha": PEFT_ALPHA})


def _published_alphas(matching: Matching, family: Family | None) -> Iterator[Notice]:
    """Files that store no alpha, of which another one is published than their rank.

    What one rank means to it, the strength can say of modules of several ranks: q, k and v in one.
    """
    name = matching.assignment.adapter.name
    published = sampling_of(matching.assignment.adapter, family).alpha
    ranks = {hit.rank for hit in matching.hits if hit.alpha and hit.alpha.source == "rank" and hit.rank}
    alpha = published.value if published else None
    if not published or not isinstance(alpha, float) or not ranks or alpha == min(ranks):
        return
    does = f"--alpha {alpha:g}" if len(ranks) == 1 else f"a strength of {alpha / min(ranks):g}"
    text = f"{name}: stores no alpha, so its rank counts; {alpha:g} is {published.origin}: say {does}"
    yield Notice("published_alpha", text, {"lora": name, "alpha": alpha, "ranks": sorted(ranks)})


def _part_of(matching: Matching, hit: Hit) -> str | None:
    """The text encoder in the component's own file that a hit is on."""
    meant = matching.assignment.component.encoders_inside(named_component(hit.module.name))
    return meant[0].name if meant else None


def _stated_rank(hit: Hit, config: AdapterConfig | None) -> int | None:
    """The configuration's, for factors that show none; nothing divides a finished factor."""
    if not hit.kind.scaled:
        return None
    if hit.module.alpha_scale is not None:
        return 1
    return config.rank_of(plain_name(hit.module.name)) if config else None
