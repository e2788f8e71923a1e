"""What is wrong with a matched set of inputs, as far as headers and a few small reads can tell. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from fuselora.alphas import alpha_notices, expert_rank_faults, unused_alphas, with_alphas
from fuselora.block_strengths import unused_blocks, with_blocks
from fuselora.composed import composed_notices
from fuselora.errors import Fault, Notice
from fuselora.file_options import option_of_each
from fuselora.kinds.lokr import misread_by_peft
from fuselora.lora.adapter import NUMBERS
from fuselora.lora.grammar import spellings
from fuselora.made_for import made_for, other_family
from fuselora.marker import FILE_NAME, FINGERPRINT_KEY, marker_home
from fuselora.match import FUSABLE, OTHER_SIZE, Matching
from fuselora.misses import miss_faults, with_misses_settled
from fuselora.name_table import name_table
from fuselora.plural import many
from fuselora.widening import widening_faults, widening_notices

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.checkpoint import Checkpoint
    from fuselora.specs import Request

FACTOR_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
QUANTISED_SIBLINGS = ("absmax", "quant_map", "nested_absmax", "quant_state.bitsandbytes__nf4",
                      "quant_state.bitsandbytes__fp4", "scale_weight", "weight_scale", "qzeros")  # fmt: skip
# What a weight is called once GPTQ, AWQ, Nunchaku or compressed-tensors has packed it.
PACKED_LEAVES = (".qweight", ".weight_packed")
TASKS = re.compile(r"(?<![a-z])[ti]2v(?![a-z])", re.IGNORECASE)
# What no quantisation made, and nothing is added to.
UNFUSABLE: Mapping[str, str] = {"F64": "float64", "C64": "complex", "BOOL": "boolean"}
DOUBTFUL = ("other_family", "task_name", "swapped_name")  # codes of notices
FLOAT32_MAX, FLOAT32_TINY = 3.4028234663852886e38, 2.0**-126


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
    alphas = option_of_each([m.assignment.adapter.location for m in matchings], request.alphas)
    checked: list[Matching] = []
    for matching in matchings:
        weighed = with_blocks(matching, request.blocks)
        source = matching.assignment.adapter.location.spec.source
        scaled, alpha_faults = with_alphas(weighed, alphas.get(source))
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
        faults += expert_rank_faults(settled)
        notices += [*matching.notices, *_skip_notices(settled), *alpha_notices(settled, checkpoint.family)]
        notices += [*_replacement_notices(settled), *_no_effect_notices(settled)]
    faults += widening_faults(checked)
    notices += composed_notices(checked)
    notices += widening_notices(checked)
    faults += [*unused_alphas(checked, request.alphas, alphas), *unused_blocks(matchings, request.blocks)]
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
    if not checkpoint.is_fused or (request.stack and checkpoint.marker is not None):
        return
    text, hint = "this base is already fused with LoRAs", "Start from the plain base"
    if checkpoint.marker is not None:
        hint = f"{hint}, or say --stack to add to what is there."
    elif home := marker_home(checkpoint.root, _fused_shard(checkpoint)):
        text = f"{text}, and is a part of {home}"
        hint = f"{hint}, or give {home} with --stack to add to what is there."
    else:
        text = f"{text}, and its {FILE_NAME} is missing"
        hint = f"{hint}; without {FILE_NAME} nobody can tell with what it was fused."
    yield Fault("already_fused", text, path=checkpoint.source, hint=hint)


def _fused_shard(checkpoint: Checkpoint) -> Path:
    """One that carries a fingerprint; there is one where no marker says that the base is fused."""
    shards = (shard for component in checkpoint.components for shard in component.shards)
    return next(shard.path for shard in shards if FINGERPRINT_KEY in shard.metadata)


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


def _scale_faults(matching: Matching) -> Iterator[Fault]:
    """Sums are float32: a scale beyond it would be infinite, a subnormal one loses digits, down to 0."""
    for hit in matching.hits:
        scale = hit.scale(matching.assignment.strength)
        if abs(scale) > FLOAT32_MAX or 0 < abs(scale) < FLOAT32_TINY:
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


def _skip_notices(matching: Matching) -> Iterator[Notice]:
    reasons: dict[str, list[str]] = {}
    for skip in matching.skipped:
        reasons.setdefault(skip.reason, []).append(skip.module.name)
    name = matching.assignment.adapter.name
    for reason, modules in reasons.items():
        text = f"{name}: {many(len(modules), 'module')} not applied: {reason}"
        yield Notice("skipped", text, {"lora": name, "reason": reason, "modules": len(modules)})
