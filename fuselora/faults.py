"""What is wrong with a matched set of inputs, as far as headers and a few small reads can tell. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fuselora.block_strengths import unused_blocks, with_blocks
from fuselora.digest import read_range
from fuselora.errors import Fault, Notice
from fuselora.kinds.kind import ALPHAS, MAGNITUDES, has_kernel
from fuselora.kinds.lokr import misread_by_peft
from fuselora.lora.adapter import NUMBERS
from fuselora.lora.config import SAME_ALPHA, AdapterConfig, config_of_metadata
from fuselora.lora.grammar import spellings
from fuselora.lora.scale import BadAlpha, resolve_alpha
from fuselora.match import FUSABLE, Hit, Matching, Skip, Unmatched, module_glob, name_table, plain_name
from fuselora.reading import reading
from fuselora.targets import named_component
from fuselora.text_encoders import MEANINGS

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.header import TensorInfo
    from fuselora.lora.adapter import Adapter, Module
    from fuselora.specs import AlphaSpec, Request

FACTOR_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
QUANTISED_SIBLINGS = ("absmax", "quant_map", "nested_absmax", "quant_state.bitsandbytes__nf4",
                      "quant_state.bitsandbytes__fp4", "scale_weight", "weight_scale", "qzeros")  # fmt: skip
# What a weight is called once GPTQ, AWQ, Nunchaku or compressed-tensors has packed it.
PACKED_LEAVES = (".qweight", ".weight_packed")
TASKS = re.compile(r"(?<![a-z])[ti]2v(?![a-z])", re.IGNORECASE)
FLOAT32_MAX = 3.4028234663852886e38
ZERO_VALUED = "all of its values are zero"
ALLOWED = "allowed to stay unmatched"


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
    checked: list[Matching] = []
    for matching in matchings:
        weighed = with_blocks(matching, request.blocks)
        scaled, alpha_faults = _with_alphas(weighed, request.alphas)
        settled = _with_misses_settled(scaled, request)
        checked.append(settled)
        packed = list(_packed_faults(settled, checkpoint))
        faults += [*matching.faults, *alpha_faults, *(packed or _miss_faults(settled, request))]
        faults += [*_dtype_faults(settled), *_quantised_faults(settled), *_scale_faults(settled)]
        faults += _peft_faults(settled)
        notices += [*matching.notices, *_metadata_notices(settled), *_skip_notices(settled)]
        notices += [*_full_factor_notices(settled), *_replacement_notices(settled)]
    faults += [*_unused_alphas(checked, request.alphas), *unused_blocks(matchings, request.blocks)]
    return Checked(tuple(checked), tuple(faults), tuple(notices))


def is_zero(adapter: Adapter, module: Module) -> bool:
    """Whether it changes nothing, all values but alpha being zero; reads up to the first byte that is not."""
    if not all(kind.is_nothing(frozenset(kind.parts)) for kind in module.kinds):
        return False
    if not MAGNITUDES.isdisjoint(module.parts):
        return False
    return all(_holds_zeros(adapter, t) for part, t in module.parts.items() if part not in ALPHAS)


def _holds_zeros(adapter: Adapter, tensor: TensorInfo) -> bool:
    header = adapter.homes[tensor.name]
    with reading(header.path), header.path.open("rb") as stream:
        start = header.data_start + tensor.start
        return all(b.count(0) == len(b) for b in read_range(stream, start, tensor.n_bytes))


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


def _task_notices(checkpoint: Checkpoint, matchings: Sequence[Matching]) -> Iterator[Notice]:
    """LoRAs that are named for text-to-video on an image-to-video base, and the other way round."""
    models = _models_of(checkpoint)
    tasks = {task for model in models if (task := _task_in(model))}
    for adapter in {m.assignment.order: m.assignment.adapter for m in matchings}.values():
        spec = adapter.location.spec
        places = [adapter.name, *reversed(PurePosixPath(spec.source).parts[-3:])]
        task = next((task for place in places if (task := _task_in(place))), None)
        if task and tasks and task not in tasks:
            base = " or ".join(models)
            text = f"{adapter.name}: is named for {task.upper()}, and the base is {base}; the shapes fit"
            yield Notice("task_name", text, {"lora": adapter.name, "base": base})


def _models_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    if checkpoint.family is None:
        return ()
    models = checkpoint.transformers
    return checkpoint.family.models_of(models[0].model_shapes(), len(models))


def _task_in(name: str) -> str | None:
    """``"t2v"`` or ``"i2v"`` when a name says exactly one of them."""
    found = {task.lower() for task in TASKS.findall(name)}
    return found.pop() if len(found) == 1 else None


def _with_alphas(matching: Matching, options: Sequence[AlphaSpec]) -> tuple[Matching, list[Fault]]:
    """Every pair's alpha, by the order of sources."""
    adapter, component = matching.assignment.adapter, matching.assignment.component.name
    option = _option_for(adapter, options)
    metadata = cache(lambda: config_of_metadata(adapter.metadata, component))
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
                metadata=metadata,
                conv=conv,
            )
        except BadAlpha as error:
            text = f"the file's metadata: {error}"
            return matching, [Fault("alpha", text, path=adapter.name, key="__metadata__")]
        hits.append(replace(hit, alpha=alpha))
    return replace(matching, hits=tuple(hits)), []


def _stated_rank(hit: Hit, config: AdapterConfig | None) -> int | None:
    """The configuration's, for factors that show none; nothing divides a finished factor."""
    if not hit.kind.scaled:
        return None
    if hit.module.alpha_scale is not None:
        return 1
    return config.rank_of(plain_name(hit.module.name)) if config else None


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
            what = f"{n_modules} modules have both factors full and so no rank"
            text = f"{name}: {what}: as {whose} defines it, {rule}"
            yield Notice("full_factors", text, {"lora": name, "modules": n_modules, "as": whose})


def _replacement_notices(matching: Matching) -> Iterator[Notice]:
    """Whole weights at another strength than 1 are no longer the trained ones."""
    name, strength = matching.assignment.adapter.name, matching.assignment.strength
    mixed = [h for h in matching.hits if h.kind.counted == "replace" and h.scale(strength) not in (0, 1)]
    if mixed:
        at = ", ".join(f"{scale:g}" for scale in sorted({hit.scale(strength) for hit in mixed}))
        text = f"{name}: {len(mixed)} replacements at strength {at}: W + strength * (replacement - W)"
        yield Notice("replace_strength", text, {"lora": name, "modules": len(mixed)})


def _option_for(adapter: Adapter, options: Sequence[AlphaSpec]) -> AlphaSpec | None:
    """The ``--alpha`` that names this file, else the one for all files."""
    names = (adapter.location.spec.source, adapter.name)
    named = (option for option in options if option.source in names)
    general = (option for option in options if option.source is None)
    return next((option for found in (named, general) for option in found), None)


def _unused_alphas(matchings: Sequence[Matching], options: Sequence[AlphaSpec]) -> Iterator[Fault]:
    for option in options:
        takers = [m for m in matchings if _option_for(m.assignment.adapter, options) == option]
        used = any(hit.alpha and hit.alpha.source == "option" for m in takers for hit in m.hits)
        if not used and not any(m.faults for m in takers):
            target = f" for {option.source}" if option.source else ""
            text = f"--alpha {option.alpha:g}{target} applies to no module"
            yield Fault(
                "unused_alpha", text, hint="Every module stores its own alpha, or no such LoRA was given."
            )


def _with_misses_settled(matching: Matching, request: Request) -> Matching:
    """Unmatched modules that are allowed or all zero become skips; the rest stay unmatched."""
    adapter = matching.assignment.adapter
    skipped: list[Skip] = list(matching.skipped)
    unmatched: list[Unmatched] = []
    for miss in matching.unmatched:
        if any(module_glob(miss.module.name, glob) for glob in request.allow_unmatched):
            skipped.append(Skip(miss.module, ALLOWED))
        elif is_zero(adapter, miss.module):
            skipped.append(Skip(miss.module, ZERO_VALUED))
        else:
            unmatched.append(miss)
    return replace(matching, skipped=tuple(skipped), unmatched=tuple(unmatched))


def _miss_faults(matching: Matching, request: Request) -> Iterator[Fault]:
    adapter = matching.assignment.adapter
    missed = [*matching.unmatched, *matching.skipped]
    if not matching.hits and not matching.faults and not any(skip.asked for skip in matching.skipped):
        yield _nothing_matched(matching, len(missed) or len(adapter.modules))
        return
    for miss in matching.unmatched:
        name = miss.module.name
        why = f" ({miss.likely})" if miss.likely else ""
        yield Fault("unmatched", f"{name} has no home in {matching.assignment.component.name}{why}",
                    path=adapter.name, key=name, hint=_miss_hint(matching))  # fmt: skip
    if request.strict:
        for skip in (skip for skip in matching.skipped if not skip.asked):
            text = f"{skip.module.name} stays unapplied: {skip.reason}"
            yield Fault(
                "strict", text, path=adapter.name, key=skip.module.name, hint="--strict allows no skips."
            )


def _nothing_matched(matching: Matching, n_modules: int) -> Fault:
    component, adapter = matching.assignment.component, matching.assignment.adapter
    lora_key = adapter.tensors[0].name
    base_key = next(iter(component.tensors()), "nothing")
    likely = {miss.likely or "it was made for another architecture" for miss in matching.unmatched}
    why = likely.pop() if len(likely) == 1 else "it was made for another architecture"
    text = f"0 of {n_modules} modules match {component.name}: {why}"
    samples = f"The LoRA has keys like {lora_key}; the base has keys like {base_key}."
    return Fault("no_match", text, path=adapter.name, key=lora_key, hint=samples)


def _miss_hint(matching: Matching) -> str:
    """What the base has; the text encoders that it has not are named as keys spell them."""
    base_key = next(iter(matching.assignment.component.tensors()), "nothing")
    named = {named_component(miss.module.name) for miss in matching.unmatched}
    lacking = " and ".join(sorted(name for name in named if name and name in MEANINGS))
    whole = f"For {lacking} fuse into a pipeline that has it. " if lacking else ""
    allow = "Name the modules that may stay unapplied with --allow-unmatched GLOB."
    return f"The base has keys like {base_key}. {whole}{allow}"


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
    tensors = component.tensors()
    for base_key in dict.fromkeys(hit.base_key for hit in matching.hits):
        dtype = tensors[base_key].dtype
        packed = any(f"{stem}.{s}" in tensors for stem in _stems(base_key) for s in QUANTISED_SIBLINGS)
        if dtype not in FUSABLE or packed:
            what = "fp8" if dtype.startswith("F8") else "quantised" if dtype != "F64" else "float64"
            yield _quantised(component, base_key, dtype, what)


def _packed_faults(matching: Matching, checkpoint: Checkpoint) -> Iterator[Fault]:
    """Modules without a home because the base's weight is packed under another name."""
    component = matching.assignment.component
    table = name_table(component, checkpoint.family, checkpoint.layout)
    for miss in matching.unmatched:
        readings = [(s, leaf) for s in spellings(miss.module.name) for leaf in PACKED_LEAVES]
        keys = [key for reading in readings for found in table.find(*reading) for key in found]
        if keys:
            yield _quantised(component, keys[0], component.tensors()[keys[0]].dtype, "quantised")


def _quantised(component: Component, base_key: str, dtype: str, what: str) -> Fault:
    text = f"{base_key} is {dtype}: fusing into a {what} base is not supported yet"
    hint = "Fuse into the bfloat16 or float32 base and quantise the result."
    return Fault("quantised", text, path=component.name, key=base_key, hint=hint)


def _stems(base_key: str) -> tuple[str, str]:
    return base_key, base_key.removesuffix(".weight")


def _metadata_notices(matching: Matching) -> Iterator[Notice]:
    """Alpha tensors win over metadata; the user hears of it when the two disagree."""
    adapter = matching.assignment.adapter
    config = _quiet_config(adapter.metadata, matching.assignment.component.name)
    shapes = {name: tensor.shape for name, tensor in matching.assignment.component.tensors().items()}
    odd = {
        hit.alpha.value
        for hit in matching.hits
        if config and hit.alpha and hit.alpha.source in ("tensor", "rs_lora")
        if not _agrees(config, hit, conv=has_kernel(shapes[hit.base_key]))
    }
    if config is not None and odd:
        values = ", ".join(f"{alpha:g}" for alpha in sorted(odd))
        said = f"its metadata says alpha {config.lora_alpha:g}, its tensors say {values}"
        text = f"{adapter.name}: {said}; the tensors count"
        yield Notice("metadata_disagrees", text, {"lora": adapter.name, "metadata": config.lora_alpha})


def _agrees(config: AdapterConfig, hit: Hit, *, conv: bool) -> bool:
    """Whether metadata alone would scale a module as its own alpha does."""
    alpha = config.alpha_of(plain_name(hit.module.name), conv=conv)
    wanted = alpha / config.divisor(hit.rank) if hit.rank else hit.ratio
    return math.isclose(hit.ratio, wanted, rel_tol=SAME_ALPHA)


def _quiet_config(metadata: Mapping[str, str], component: str) -> AdapterConfig | None:
    try:
        return config_of_metadata(metadata, component)
    except BadAlpha:
        return None


def _skip_notices(matching: Matching) -> Iterator[Notice]:
    reasons: dict[str, list[str]] = {}
    for skip in matching.skipped:
        reasons.setdefault(skip.reason, []).append(skip.module.name)
    name = matching.assignment.adapter.name
    for reason, modules in reasons.items():
        text = f"{name}: {len(modules)} modules not applied: {reason}"
        yield Notice("skipped", text, {"lora": name, "reason": reason, "modules": len(modules)})
