"""Which LoRA goes to which component. An expert is never guessed; a file name can only contradict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fuselora.checkpoint import Checkpoint, Component
from fuselora.errors import Fault, Notice
from fuselora.lora.adapter import Adapter
from fuselora.lora.grammar import spellings
from fuselora.specs import ALL

# What else is high or low in file names: low_rank, high_quality.
_OTHER = "rank|res|vram|mem|step|quality|detail|motion|contrast|fps|poly|fidelity|def|speed"
_EXPERT_WORD = re.compile(
    rf"(?<![a-z])(?P<expert>high|low)(?=[-_ ]?noise|(?![a-z])(?![-_ ]?(?:{_OTHER})))", re.IGNORECASE
)
FIRST = "transformer"
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
        if stray := _stray_keys(adapter, components, checkpoint):
            faults.append(stray)
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
    return spellings(module)[-1].component


def key_owners(adapter: Adapter) -> frozenset[str]:
    """The components whose prefix keys have; keys of none beside such keys are the first expert's."""
    named = {named_component(module.name) for module in adapter.modules}
    return frozenset(name or FIRST for name in named) if named - {None} else frozenset()


def one_for_all(owners: frozenset[str], component: Component) -> bool:
    """Whether every key may go to the component: none says for whom, or all the same and it has no twin."""
    return not owners or (len(owners) == 1 and component.role == "single")


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
        "was given for none of this base's two experts",
        THREE_SPELLINGS,
    )


def _by_keys(adapter: Adapter, checkpoint: Checkpoint) -> tuple[Component, ...]:
    """The components that the keys themselves name, when every module's key names one."""
    named = {named_component(m.name) or _plainly_first(m.name) for m in adapter.modules}
    if None in named or "transformer_2" not in named:
        return ()
    return tuple(component for component in checkpoint.components if component.name in named)


def _plainly_first(module: str) -> str | None:
    return FIRST if any(s.name.startswith(f"{FIRST}.") for s in spellings(module)) else None


def _stray_keys(adapter: Adapter, components: Sequence[Component], checkpoint: Checkpoint) -> Fault | None:
    """Keys for a component that the file was not given for, or a component that it has no keys for."""
    owners, given = key_owners(adapter), {component.name for component in components}
    if owners == given or all(one_for_all(owners, component) for component in components):
        return None
    text = f"has keys for {_and(owners)}, and was given for {_and(given)}"
    if all(checkpoint.component(name) for name in owners):
        return _fault(
            adapter, "stray_keys", text, f"Leave the target out: --lora {adapter.location.spec.source}"
        )
    return _fault(adapter, "stray_keys", text, "Fuse it into the whole pipeline, or split the file.")


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


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
    text = f"is named for the {said}-noise expert, and {where} is the {expected}-noise one"
    if spec.component is None:
        hint = "If this is meant, name the target of each file: --lora COMPONENT=FILE."
        yield _fault(adapter, "swapped", text, hint)
    else:
        text = f"{adapter.name}: {text}"
        yield Notice("swapped_name", text, {"lora": adapter.name, "component": components[0].name})


def _expert_of(component: Component, checkpoint: Checkpoint) -> str | None:
    if component.role != "single":
        return component.role.removesuffix("_noise")
    return expert_in_name(checkpoint.root.name)


def _where(component: Component, checkpoint: Checkpoint) -> str:
    return component.name if component.role != "single" else checkpoint.root.name


def _fault(adapter: Adapter, kind: str, message: str, hint: str | None) -> Fault:
    return Fault(kind, message, path=adapter.name, hint=hint)
