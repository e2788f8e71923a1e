"""What is wrong with a matched set of inputs, as far as headers and a few small reads can tell. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fuselora.block_strengths import unused_blocks, with_blocks
from fuselora.composed import composed_notices
from fuselora.errors import Fault, Notice
from fuselora.kinds.kind import has_kernel
from fuselora.kinds.lokr import misread_by_peft
from fuselora.lora.adapter import NUMBERS
from fuselora.lora.config import PEFT_ALPHA, SAME_ALPHA, AdapterConfig, config_of_metadata
from fuselora.lora.config_faults import REPAIR
from fuselora.lora.grammar import spellings
from fuselora.lora.sampling import sampling_of
from fuselora.lora.scale import BadNumber, resolve_alpha
from fuselora.made_for import made_for, other_family
from fuselora.match import FUSABLE, OTHER_SIZE, Hit, Matching, plain_name
from fuselora.misses import miss_faults, with_misses_settled
from fuselora.name_table import name_table
from fuselora.plural import many
from fuselora.targets import named_component
from fuselora.widening import widening_faults, widening_notices

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint
    from fuselora.families import Family
    from fuselora.lora.adapter import Adapter
    from fuselora.specs import AlphaSpec, Request

FACTOR_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
QUANTISED_SIBLINGS = ("absmax", "quant_map", "nested_absmax", "quant_state.bitsandbytes__nf4",
                      "quant_state.bitsandbytes__fp4", "scale_weight", "weight_scale", "qzeros")  # fmt: skip
# What a weight is called once GPTQ, AWQ, Nunchaku or compressed-tensors has packed it.
PACKED_LEAVES = (".qweight", ".weight_packed")
TASKS = re.compile(r"(?<![a-z])[ti]2v(?![a-z])", re.IGNORECASE)
# What no quantisation made, and nothing is added to.
UNFUSABLE: Mapping[str, str] = {"F64": "float64", "C64": "complex", "BOOL": "boolean"}
DOUBTFUL = ("other_family", "task_name", "swapped_name")  # codes of notices
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Checked:
    """Matchings with every alpha known and every miss explained, or the faults that forbid the run."""

    matchings: tuple[Matching, ...]
    faults: tuple[Fault, ...]
    notices: tuple[Notice, ...]


def check(checkpoint: Checkpoint, matchings: Sequence[Matching], request: Request) -> Checked:
    """All faults that need no weights: fused or packed bases, alphas, misses, dtypes, zero matches."""
    faults = list(_fused_faults(checkpoint, request))
    notices = [*_base_notices(checkpoint, request), *_task_notices(checkpoint, matchings)]
    notices += _family_notices(checkpoint, matchings)
    checked: list[Matching] = []
    for matching in matchings:
        weighed = with_blocks(matching, request.blocks)
        scaled, alpha_faults = _with_alphas(weighed, request.alphas)
        settled = with_misses_settled(scaled, request)
        checked.append(settled)
        packed = list(_packed_faults(settled, checkpoint))
        faults += [
            *_with_target(matching, checkpoint),
            *alpha_faults,
            *(packed or _missed(settled, request, checkpoint, matchings)),
        ]
        faults += [*_dtype_faults(settled), *_quantised_faults(settled), *_scale_faults(settled)]
        faults += _peft_faults(settled)
        notices += [*matching.notices, *_metadata_notices(settled), *_skip_notices(settled)]
        notices += [*_full_factor_notices(settled), *_replacement_notices(settled)]
        notices += [*_default_alpha_notices(settled), *_no_effect_notices(settled)]
        notices += _published_alphas(settled, checkpoint.family)
        faults += _expert_rank_faults(settled)
    faults += widening_faults(checked)
    notices += composed_notices(checked)
    notices += widening_notices(checked)
    faults += [*_unused_alphas(checked, request.alphas), *unused_blocks(matchings, request.blocks)]
    return Checked(tuple(checked), tuple(faults), tuple(notices))


def _with_target(matching: Matching, checkpoint: Checkpoint) -> tuple[Fault, ...]:
    """The matching's own faults; what has another shape says which model the LoRA is for."""
    unfit = {str(fault.key) for fault in matching.faults if fault.hint == OTHER_SIZE}
    if not unfit:
        return matching.faults
    hint = made_for(matching.assignment.adapter, checkpoint).rstrip() or _size_hint(matching, unfit)
    return tuple(
        replace(fault, hint=hint) if fault.hint == OTHER_SIZE else fault for fault in matching.faults
    )


def _size_hint(matching: Matching, unfit: Set[str]) -> str:
    """Of a LoRA that no other model is known to fit, how much of it fits this one."""
    modules = {hit.module.name for hit in matching.hits}
    if n_fitting := len(modules - unfit):
        fits = f"{n_fitting} of {many(len(modules), 'module')} fit the base"
        return f"{fits}: the LoRA is for a variant of this model, or the file is broken."
    return OTHER_SIZE


def _missed(
    settled: Matching, request: Request, checkpoint: Checkpoint, matchings: Sequence[Matching]
) -> Iterator[Fault]:
    order, component = settled.assignment.order, settled.assignment.component.name
    others = (m.assignment for m in matchings if m.hits)
    elsewhere = any(a.order == order and a.component.name != component for a in others)
    return miss_faults(settled, request, checkpoint, elsewhere=elsewhere)


def _fused_faults(checkpoint: Checkpoint, request: Request) -> Iterator[Fault]:
    if not checkpoint.is_fused:
        return
    if not request.stack:
        yield Fault(
            "already_fused",
            "this base is already fused with LoRAs",
            path=checkpoint.source,
            hint="Start from the plain base, or say --stack to add to what is there.",
        )
    elif checkpoint.marker is None:
        yield Fault(
            "already_fused",
            "its shards say that they are fused, but fused.json is missing",
            path=checkpoint.source,
            hint="Restore fused.json; without it nobody can tell with what the base was fused.",
        )


def _base_notices(checkpoint: Checkpoint, request: Request) -> Iterator[Notice]:
    for component in checkpoint.components:
        if component.strays:
            names = ", ".join(component.strays)
            text = f"{component.name}: not copied, because the index does not name them: {names}"
            yield Notice(
                "stray_weights", text, {"component": component.name, "files": list(component.strays)}
            )
        if "quantization_config" in component.config:
            text = f"{component.name}: config.json has a quantization_config, but the weights are plain"
            yield Notice("quantization_config", text, {"component": component.name})
    if request.stack and not checkpoint.is_fused:
        yield Notice("not_stacked", "--stack was given, but the base is not fused with anything", {})


def _family_notices(checkpoint: Checkpoint, matchings: Sequence[Matching]) -> Iterator[Notice]:
    """LoRAs whose names and shapes fit, and that are for another family all the same."""
    transformers = {component.name for component in checkpoint.transformers}
    fitting = (m.assignment for m in matchings if m.hits and m.assignment.component.name in transformers)
    for adapter in {assignment.order: assignment.adapter for assignment in fitting}.values():
        origin = other_family(adapter, checkpoint)
        if origin and checkpoint.family:
            base = checkpoint.family.name
            text = f"{adapter.name}: is for {origin.named}, {origin.evidence}; the base is {base}"
            facts = {"lora": adapter.name, "families": list(origin.families), "base": base}
            yield Notice("other_family", text, {**facts, "evidence": origin.evidence})


def strict_faults(notices: Sequence[Notice]) -> Iterator[Fault]:
    """What is most likely a slip, and fused all the same where ``--strict`` does not say otherwise."""
    for notice in notices:
        if notice.code in DOUBTFUL:
            lora = str(notice.facts["lora"])
            text = notice.message.removeprefix(f"{lora}: ")
            yield Fault("strict", text, path=lora, hint="--strict takes this warning for an error.")


def _task_notices(checkpoint: Checkpoint, matchings: Sequence[Matching]) -> Iterator[Notice]:
    """LoRAs that are named for text-to-video on an image-to-video base, and the other way round."""
    models = checkpoint.models
    tasks = {task for model in models if (task := _task_in(model))}
    for adapter in {m.assignment.order: m.assignment.adapter for m in matchings}.values():
        spec = adapter.location.spec
        places = [adapter.name, *reversed(PurePosixPath(spec.source).parts[-3:])]
        task = next((task for place in places if (task := _task_in(place))), None)
        if task and tasks and task not in tasks:
            base = " or ".join(models)
            text = f"{adapter.name}: is named for {task.upper()}, and the base is {base}; the shapes fit"
            yield Notice("task_name", text, {"lora": adapter.name, "base": base})


def _task_in(name: str) -> str | None:
    """``"t2v"`` or ``"i2v"`` when a name says exactly one of them."""
    found = {task.lower() for task in TASKS.findall(name)}
    return found.pop() if len(found) == 1 else None


def _with_alphas(matching: Matching, options: Sequence[AlphaSpec]) -> tuple[Matching, list[Fault]]:
    """Every pair's alpha, by the order of sources."""
    adapter, component = matching.assignment.adapter, matching.assignment.component.name
    option = _option_for(adapter, options)
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


def _expert_rank_faults(matching: Matching) -> Iterator[Fault]:
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


def _default_alpha_notices(matching: Matching) -> Iterator[Notice]:
    """A configuration that leaves alpha out means PEFT's, as PEFT loads it."""
    adapter, in_metadata = matching.assignment.adapter, _metadata_configs(matching)
    used = [hit for hit in matching.hits if hit.alpha and hit.alpha.source in ("adapter_config", "metadata")]
    configs = (adapter.config or in_metadata(hit) for hit in used)
    if any(config and config.by_default for config in configs):
        text = f"{adapter.name}: its configuration gives no alpha, so PEFT's default counts: {PEFT_ALPHA:g}"
        yield Notice("default_alpha", text, {"lora": adapter.name, "alpha": PEFT_ALPHA})


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


def _replacement_notices(matching: Matching) -> Iterator[Notice]:
    """Whole weights at another strength than 1 are no longer the trained ones."""
    name, strength = matching.assignment.adapter.name, matching.assignment.strength
    mixed = [h for h in matching.hits if h.kind.replaces and h.scale(strength) not in (0, 1)]
    if mixed:
        at = ", ".join(f"{scale:g}" for scale in sorted({hit.scale(strength) for hit in mixed}))
        text = f"{name}: {len(mixed)} replacements at strength {at}: W + strength * (replacement - W)"
        yield Notice("replace_strength", text, {"lora": name, "modules": len(mixed)})


def _no_effect_notices(matching: Matching) -> Iterator[Notice]:
    """A LoRA is listed in the marker whatever its strength."""
    if matching.hits and not matching.adds:
        name = matching.assignment.adapter.name
        text = f"{name}: adds nothing to {matching.assignment.component.name}, as its scale is 0"
        yield Notice("no_effect", text, {"lora": name, "component": matching.assignment.component.name})


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


def _option_for(adapter: Adapter, options: Sequence[AlphaSpec]) -> AlphaSpec | None:
    """The ``--alpha`` that names this file, else the one for all files."""
    names = (adapter.location.spec.source, adapter.name)
    named = (option for option in options if option.source in names)
    general = (option for option in options if option.source is None)
    return next((option for found in (named, general) for option in found), None)


def _unused_alphas(matchings: Sequence[Matching], options: Sequence[AlphaSpec]) -> Iterator[Fault]:
    for option in options:
        takers = [m for m in matchings if _option_for(m.assignment.adapter, options) == option]
        sources = dict.fromkeys(m.assignment.adapter.location.spec.source for m in takers)
        if option.source and len(sources) > 1:
            text = f"--alpha {option.alpha:g} for {option.source}: {len(sources)} LoRAs are called so"
            yield Fault("ambiguous", text, hint=f"Say which: {' or '.join(sources)}.")
            continue
        used = any(hit.alpha and hit.alpha.source == "option" for m in takers for hit in m.hits)
        if not used and not any(m.faults for m in takers):
            target = f" for {option.source}" if option.source else ""
            text = f"--alpha {option.alpha:g}{target} applies to no module"
            yield Fault(
                "unused_alpha", text, hint="Every module stores its own alpha, or no such LoRA was given."
            )


def _scale_faults(matching: Matching) -> Iterator[Fault]:
    """Sums are float32: a scale beyond it would be infinite."""
    for hit in matching.hits:
        scale = hit.scale(matching.assignment.strength)
        if abs(scale) > FLOAT32_MAX:
            text = f"{hit.module.name}: the scale {scale:g} does not fit float32"
            yield Fault("scale", text, path=matching.assignment.adapter.name, key=hit.module.name)


def _peft_faults(matching: Matching) -> Iterator[Fault]:
    """Adapters that PEFT trained with arithmetic that is not the kind's."""
    adapter = matching.assignment.adapter
    if adapter.config is None or adapter.config.stated_rank is None:
        return
    for hit in matching.hits:
        if misread_by_peft(hit.module.shapes):
            name = hit.module.name
            text = f"{name}: PEFT's LoKr of a 1-D convolution with a full lokr_w2 is no Kronecker product"
            yield Fault("unsupported", text, path=adapter.name, key=name)


def _dtype_faults(matching: Matching) -> Iterator[Fault]:
    for hit in matching.hits:
        for part, tensor in hit.parts.items():
            if tensor.dtype not in FACTOR_DTYPES and part not in NUMBERS:
                text = f"{tensor.name} has the dtype {tensor.dtype}, which holds no delta"
                yield Fault("dtype", text, path=matching.assignment.adapter.name, key=tensor.name)


def _quantised_faults(matching: Matching) -> Iterator[Fault]:
    """Targets that are packed or fp8: adding to them as if they were plain would write garbage."""
    component = matching.assignment.component
    tensors, places = component.tensors(), component.weight_paths()
    for base_key in dict.fromkeys(hit.base_key for hit in matching.hits):
        dtype = tensors[base_key].dtype
        packed = any(f"{stem}.{s}" in tensors for stem in _stems(base_key) for s in QUANTISED_SIBLINGS)
        if dtype not in FUSABLE or packed:
            what = UNFUSABLE.get(dtype, "fp8" if dtype.startswith("F8") else "quantised")
            yield _quantised(str(places[base_key]), base_key, dtype, what)


def _packed_faults(matching: Matching, checkpoint: Checkpoint) -> Iterator[Fault]:
    """Modules without a home because the base's weight is packed under another name."""
    component = matching.assignment.component
    if not matching.unmatched:
        return
    table = name_table(component, checkpoint.family, checkpoint.layout)
    tensors, places = component.tensors(), component.weight_paths()
    for miss in matching.unmatched:
        readings = [(s, leaf) for s in spellings(miss.module.name) for leaf in PACKED_LEAVES]
        found = [homes for reading in readings for homes in table.find(*reading).values()]
        if found:
            key = found[0][0].places[0].base_key
            yield _quantised(str(places[key]), key, tensors[key].dtype, "quantised")


def _quantised(path: str, base_key: str, dtype: str, what: str) -> Fault:
    text = f"{base_key} is {dtype}: fusing into a {what} base is not supported yet"
    then = "" if what in UNFUSABLE.values() else " and quantise the result"
    hint = f"Fuse into the bfloat16 or float32 base{then}."
    return Fault("quantised", text, path=path, key=base_key, hint=hint)


def _stems(base_key: str) -> tuple[str, str]:
    return base_key, base_key.removesuffix(".weight")


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


def _skip_notices(matching: Matching) -> Iterator[Notice]:
    reasons: dict[str, list[str]] = {}
    for skip in matching.skipped:
        reasons.setdefault(skip.reason, []).append(skip.module.name)
    name = matching.assignment.adapter.name
    for reason, modules in reasons.items():
        text = f"{name}: {many(len(modules), 'module')} not applied: {reason}"
        yield Notice("skipped", text, {"lora": name, "reason": reason, "modules": len(modules)})
