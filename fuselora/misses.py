"""LoRA modules without a home in the base: what explains them, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fuselora.digest import read_range
from fuselora.errors import Fault
from fuselora.globs import glob_of, means
from fuselora.kinds.kind import ALPHAS, MAGNITUDES
from fuselora.made_for import made_for, other_family
from fuselora.match import OTHER_SIZE, Matching, Skip, Unmatched
from fuselora.reading import reading
from fuselora.targets import named_component
from fuselora.text_encoders import MEANINGS
from fuselora.zeros import all_zero

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint
    from fuselora.header import TensorInfo
    from fuselora.lora.adapter import Adapter, Module
    from fuselora.specs import Request

ZERO_VALUED = "all values are zero"
ALLOWED = "allowed to stay unmatched"
OTHER_ARCHITECTURE = "it was made for another architecture"


def with_misses_settled(matching: Matching, request: Request) -> Matching:
    """Unmatched modules that are allowed or all zero become skips; the rest stay unmatched."""
    adapter = matching.assignment.adapter
    skipped: list[Skip] = list(matching.skipped)
    unmatched: list[Unmatched] = []
    for miss in matching.unmatched:
        if any(means(glob, miss.module.name) for glob in request.allow_unmatched):
            skipped.append(Skip(miss.module, ALLOWED))
        elif is_zero(adapter, miss.module):
            skipped.append(Skip(miss.module, ZERO_VALUED))
        else:
            unmatched.append(miss)
    return replace(matching, skipped=tuple(skipped), unmatched=tuple(unmatched))


def miss_faults(
    matching: Matching, request: Request, checkpoint: Checkpoint, *, elsewhere: bool
) -> Iterator[Fault]:
    """Every module without a home, or that none has one.

    ``elsewhere``: whether the LoRA has hits in another component, so that this part of it may all be
    allowed to stay out.
    """
    adapter = matching.assignment.adapter
    missed = [*matching.unmatched, *matching.skipped]
    asked = any(skip.asked for skip in matching.skipped)
    allowed = elsewhere and not matching.unmatched
    if not matching.hits and not matching.faults and not asked and not allowed:
        yield _nothing_matched(matching, len(missed) or len(adapter.modules), made_for(adapter, checkpoint))
        return
    hint = _miss_hint(matching, checkpoint) if matching.unmatched else ""
    for miss in matching.unmatched:
        name = miss.module.name
        why = f" ({miss.likely})" if miss.likely else ""
        yield Fault("unmatched", f"{name} has no home in {matching.assignment.component.name}{why}",
                    path=adapter.name, key=name, hint=hint)  # fmt: skip
    if request.strict:
        for skip in (skip for skip in matching.skipped if not skip.asked):
            text = f"{skip.module.name} stays unapplied: {skip.reason}"
            yield Fault(
                "strict", text, path=adapter.name, key=skip.module.name, hint="--strict allows no skips."
            )


def _nothing_matched(matching: Matching, n_modules: int, meant: str) -> Fault:
    component, adapter = matching.assignment.component, matching.assignment.adapter
    lora_key = adapter.tensors[0].name
    base_key = next(iter(component.tensors()), "nothing")
    likely = {miss.likely or OTHER_ARCHITECTURE for miss in matching.unmatched}
    reasons = likely or {skip.reason for skip in matching.skipped}
    why = reasons.pop() if len(reasons) == 1 else OTHER_ARCHITECTURE
    text = f"0 of {n_modules} modules match {component.name}: {why}"
    samples = f"The LoRA has keys like {lora_key}; the base has keys like {base_key}."
    if component.is_text_encoder:
        samples += " Name what may stay unapplied with --allow-unmatched GLOB."
    return Fault("no_match", text, path=adapter.name, key=lora_key, hint=f"{meant}{samples}")


def _miss_hint(matching: Matching, checkpoint: Checkpoint) -> str:
    """What the base has; the text encoders that it has not are named as keys spell them.

    What may stay unapplied is asked only where the rest could be fused, and fused sensibly.
    """
    meant = made_for(matching.assignment.adapter, checkpoint)
    if other_family(matching.assignment.adapter, checkpoint):
        return meant.rstrip()
    component = matching.assignment.component
    base_key = next(iter(component.tensors()), "nothing")
    named = {named_component(miss.module.name) for miss in matching.unmatched}
    asked = (name for name in named if name and name in MEANINGS)
    absent = sorted(name for name in asked if not component.encoders_inside(name))
    lacking = " and ".join(absent)
    whole = f"For {lacking} fuse into a pipeline that has it. " if lacking else ""
    unfit = any(fault.hint == OTHER_SIZE for fault in matching.faults)
    allow = "" if unfit else _leave_out(matching, absent)
    return f"{meant or f'The base has keys like {base_key}. '}{whole}{allow}".rstrip()


def _leave_out(matching: Matching, absent: Sequence[str]) -> str:
    """The option, for the halves of text encoders that the base lacks as it has to be given."""
    names = [miss.module.name for miss in matching.unmatched]
    halves = [[name for name in names if named_component(name) == encoder] for encoder in absent]
    if sum(map(len, halves)) < len(names):
        return "Name the modules that may stay unapplied with --allow-unmatched GLOB."
    globs = (f"--allow-unmatched '{glob_of(half)}'" for half in halves)
    return f"To leave that out: {' '.join(globs)}"


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
        return all(all_zero(block, tensor.dtype) for block in read_range(stream, start, tensor.n_bytes))
