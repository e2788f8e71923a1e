"""Which LoRA goes to which component. An expert is never guessed; a file name can only contradict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fuselora.checkpoint import Checkpoint, Component
from fuselora.errors import Fault, Notice
from fuselora.lora.adapter import Adapter
from fuselora.lora.grammar import COMPONENT_PREFIXES
from fuselora.specs import ALL

_EXPERT_WORD = re.compile(
    r"(?<![a-z])(?P<expert>high|low)(?=[-_ ]?noise|(?![a-z])(?![-_ ]?(?:rank|res|vram|mem|step)))",
    re.IGNORECASE,
)
THREE_SPELLINGS = (
    "Say which: --lora HIGH.safetensors,LOW.safetensors for one file per expert, "
    "--lora transformer_2=FILE for one expert, or --lora all=FILE for one file on both."
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One LoRA on one component. ``order`` is the place in which LoRAs are summed."""

    order: int
    adapter: Adapter
    component: Component

    @property
    def strength(self) -> float:
        return self.adapter.location.spec.strength


@dataclass(frozen=True, slots=True)
class Assigned:
    """All assignments in the order of the sums, with what is wrong and what should be said."""

    assignments: tuple[Assignment, ...]
    faults: tuple[Fault, ...]
    notices: tuple[Notice, ...]


def assign(adapters: Sequence[Adapter], checkpoint: Checkpoint) -> Assigned:
    """Every LoRA's components, from what the user said and, for a file that names them, its keys."""
    assignments: list[Assignment] = []
    faults: list[Fault] = []
    notices: list[Notice] = []
    for order, adapter in enumerate(adapters):
        components = _components_for(adapter, checkpoint)
        if isinstance(components, Fault):
            faults.append(components)
            continue
        assignments += [Assignment(order, adapter, component) for component in components]
        for contradiction in _contradictions(adapter, components, checkpoint):
            if isinstance(contradiction, Fault):
                faults.append(contradiction)
            else:
                notices.append(contradiction)
    return Assigned(tuple(assignments), tuple(faults), tuple(notices))


def named_component(module: str) -> str | None:
    """The component that a module's own prefix names, where it names one."""
    return next((name for prefix, name in COMPONENT_PREFIXES.items() if module.startswith(prefix)), None)


def expert_in_name(name: str) -> str | None:
    """``"high"`` or ``"low"`` when a file or folder name says exactly one of them."""
    found = {match["expert"].lower() for match in _EXPERT_WORD.finditer(name)}
    return found.pop() if len(found) == 1 else None


def _components_for(adapter: Adapter, checkpoint: Checkpoint) -> tuple[Component, ...] | Fault:
    spec, components = adapter.location.spec, checkpoint.components
    if spec.component == ALL:
        return components
    if spec.component is not None:
        named = checkpoint.component(spec.component)
        return (named,) if named else _no_component(adapter, checkpoint)
    if spec.listed > 1:
        if spec.listed != len(components):
            return _wrong_list(adapter, checkpoint)
        return (components[spec.position],)
    if len(components) == 1:
        return components
    return _by_keys(adapter, checkpoint) or _fault(
        adapter,
        "untargeted",
        f"this base has two experts and {adapter.name} was given for none",
        THREE_SPELLINGS,
    )


def _by_keys(adapter: Adapter, checkpoint: Checkpoint) -> tuple[Component, ...]:
    """The components that the keys themselves name, when every module's key names one."""
    named = {named_component(m.name) or _plainly_first(m.name) for m in adapter.modules}
    if None in named or "transformer_2" not in named:
        return ()
    return tuple(component for component in checkpoint.components if component.name in named)


def _plainly_first(module: str) -> str | None:
    return "transformer" if module.startswith("transformer.") else None


def _no_component(adapter: Adapter, checkpoint: Checkpoint) -> Fault:
    have = ", ".join(component.name for component in checkpoint.components)
    wanted = adapter.location.spec.component
    return _fault(adapter, "no_component", f"was given for {wanted}, but this base has only {have}", None)


def _wrong_list(adapter: Adapter, checkpoint: Checkpoint) -> Fault:
    n_listed, n_components = adapter.location.spec.listed, len(checkpoint.components)
    if n_components == 1:
        hint = "A comma separates the files of two experts; to stack LoRAs, repeat --lora."
        return _fault(adapter, "list", f"a list of {n_listed} files on a base with one transformer", hint)
    text = f"a list of {n_listed} files on a base with {n_components} experts"
    return _fault(adapter, "list", text, THREE_SPELLINGS)


def _contradictions(
    adapter: Adapter, components: Sequence[Component], checkpoint: Checkpoint
) -> Iterator[Fault | Notice]:
    """A file named for one expert that was given for the other."""
    said = expert_in_name(adapter.name)
    spec = adapter.location.spec
    if said is None or spec.component == ALL or len(components) != 1:
        return
    expected = _expert_of(components[0], checkpoint)
    if expected is None or said == expected:
        return
    where = _where(components[0], checkpoint)
    text = f"{adapter.name} is named for the {said}-noise expert, and {where} is the {expected}-noise one"
    if spec.component is None:
        hint = f"If this is meant, name the target: --lora {components[0].name}={spec.source}"
        yield _fault(adapter, "swapped", text, hint)
    else:
        yield Notice("swapped_name", text, {"lora": adapter.name, "component": components[0].name})


def _expert_of(component: Component, checkpoint: Checkpoint) -> str | None:
    if component.role != "single":
        return component.role.removesuffix("_noise")
    return expert_in_name(checkpoint.root.name)


def _where(component: Component, checkpoint: Checkpoint) -> str:
    return component.name if component.role != "single" else checkpoint.root.name


def _fault(adapter: Adapter, kind: str, message: str, hint: str | None) -> Fault:
    return Fault(kind, message, path=adapter.name, hint=hint)
