"""Which LoRA goes to which component. An expert is never guessed; a file name can only contradict.

Keys of a text encoder say so by their own prefix and go there; all else is about the other keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fuselora.checkpoint import Checkpoint, Component
from fuselora.errors import Fault, Notice
from fuselora.lora.adapter import Adapter, Module
from fuselora.lora.grammar import spellings
from fuselora.specs import ALL
from fuselora.text_encoders import MEANINGS, TEXT_ENCODERS

# What else is high or low in file names: low_rank, high_quality.
_OTHER = "rank|res|vram|mem|step|quality|detail|motion|contrast|fps|poly|fidelity|def|speed"
_EXPERT_WORD = re.compile(
    rf"(?<![a-z])(?P<expert>high|low)(?=[-_ ]?noise|(?![a-z])(?![-_ ]?(?:{_OTHER})))", re.IGNORECASE
)
FIRST = "transformer"
ANY_ENCODER = "lora_te_"  # kohya's, of models that have but one
THREE_SPELLINGS = (
    "Say which: --lora HIGH.safetensors,LOW.safetensors for one file per expert, "
    "--lora transformer_2=FILE for one expert, or --lora all=FILE for one file on both."
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One LoRA on one component: its ``modules`` there. ``order`` is the place in which LoRAs are summed."""

    order: int
    adapter: Adapter
    component: Component
    modules: tuple[Module, ...]

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
        assignments += [
            Assignment(order, adapter, component, modules_for(adapter, component, checkpoint))
            for component in components
        ]
        models = [component for component in components if not component.is_text_encoder]
        for contradiction in _contradictions(adapter, models, checkpoint):
            if isinstance(contradiction, Fault):
                faults.append(contradiction)
            else:
                notices.append(contradiction)
    return Assigned(tuple(assignments), tuple(faults), tuple(notices))


def encoders_named(adapters: Iterable[Adapter]) -> frozenset[str]:
    """The names of text encoders that keys begin with, or that LoRAs were given for."""
    named = {named_component(module.name) for adapter in adapters for module in adapter.modules}
    given = {adapter.location.spec.component for adapter in adapters}
    return frozenset(name for name in named | given if name and name in MEANINGS)


def named_component(module: str) -> str | None:
    """The component that a module's own prefix names, where it names one; an encoder as it is spelled."""
    return spellings(module)[-1].component


def key_owners(adapter: Adapter) -> frozenset[str]:
    """The components whose prefix keys have; keys of none beside such keys are the first expert's."""
    return _owners(map(_named, adapter.modules))


def modules_for(adapter: Adapter, component: Component, checkpoint: Checkpoint) -> tuple[Module, ...]:
    """The modules meant for one component: a file for both experts says with a prefix whose is which.

    A file that names no text encoder of the base can be given for any. Keys of an encoder that the base
    lacks are otherwise with the transformers' keys, and have no home there.
    """
    given = adapter.location.spec.component
    if given is not None and component.encoders_inside(given):
        return tuple(_named_for(module, given) for module in adapter.modules)
    halves = _halves(adapter, checkpoint)
    if component.is_text_encoder:
        return halves.encoders.get(component.name, halves.rest)
    if _one_for_all(_owners(map(_expert, halves.rest)), component):
        return halves.rest
    return tuple(m for m in halves.rest if (_expert(m) or FIRST) == component.name)


@dataclass(frozen=True, slots=True)
class _Halves:
    """A LoRA's modules: those of each text encoder of the base, those that could be of several, the rest."""

    encoders: Mapping[str, tuple[Module, ...]]
    unclear: Mapping[str, tuple[str, ...]]
    rest: tuple[Module, ...]


def _halves(adapter: Adapter, checkpoint: Checkpoint) -> _Halves:
    encoders: dict[str, list[Module]] = {}
    unclear: dict[str, tuple[str, ...]] = {}
    rest: list[Module] = []
    for module in adapter.modules:
        named = named_component(module.name)
        meant = checkpoint.encoders_meant(named)
        if len(meant) == 1:
            encoders.setdefault(meant[0], []).append(module)
        else:
            rest.append(module)
        if named and len(meant) > 1:
            unclear[named] = meant
    return _Halves({name: tuple(modules) for name, modules in encoders.items()}, unclear, tuple(rest))


def _named_for(module: Module, encoder: str) -> Module:
    """Its keys as if they had the prefix of the text encoder that their file was given for."""
    if module.name.startswith(ANY_ENCODER):
        number = TEXT_ENCODERS.index(encoder) + 1
        return replace(module, name=f"lora_te{number}_{module.name.removeprefix(ANY_ENCODER)}")
    return module if _named(module) else replace(module, name=f"{encoder}.{module.name}")


def _named(module: Module) -> str | None:
    return named_component(module.name)


def _expert(module: Module) -> str | None:
    """The transformer that a module's own prefix names."""
    named = _named(module)
    return None if named in MEANINGS else named


def _owners(names: Iterable[str | None]) -> frozenset[str]:
    named = set(names)
    return frozenset(name or FIRST for name in named) if named - {None} else frozenset()


def _one_for_all(owners: frozenset[str], component: Component) -> bool:
    """Whether every key may go to the component: none says for whom, or all the same and it has no twin."""
    return not owners or (len(owners) == 1 and component.role == "single")


def expert_in_name(name: str) -> str | None:
    """``"high"`` or ``"low"`` when a file or folder name says exactly one of them."""
    found = {match["expert"].lower() for match in _EXPERT_WORD.finditer(name)}
    return found.pop() if len(found) == 1 else None


def _components_for(adapter: Adapter, checkpoint: Checkpoint) -> tuple[Component, ...] | Fault:
    halves, spec = _halves(adapter, checkpoint), adapter.location.spec
    if spec.component in TEXT_ENCODERS:
        return _given_encoder(adapter, spec.component, halves, checkpoint)
    if halves.unclear:
        return _unclear(adapter, halves.unclear)
    encoders = tuple(c for c in checkpoint.components if c.name in halves.encoders)
    if encoders and not halves.rest and spec.component in (None, ALL) and spec.listed == 1:
        return encoders
    models = _models_for(adapter, halves, checkpoint)
    if isinstance(models, Fault):
        return models
    return _stray_keys(adapter, halves, models, checkpoint) or (*models, *encoders)


def _models_for(adapter: Adapter, halves: _Halves, checkpoint: Checkpoint) -> tuple[Component, ...] | Fault:
    """The transformers that a file was given for, or that its keys name."""
    spec, models = adapter.location.spec, checkpoint.transformers
    if spec.component == ALL:
        return models
    if spec.component is not None:
        named = checkpoint.component(spec.component)
        return (named,) if named else _no_component(adapter, checkpoint)
    if spec.listed > 1:
        if spec.listed != len(models):
            return _wrong_list(adapter, checkpoint)
        return (models[spec.position],)
    if len(models) == 1:
        return models
    return _by_keys(halves.rest, checkpoint) or _fault(
        adapter,
        "untargeted",
        "was given for none of this base's two experts",
        THREE_SPELLINGS,
    )


def _given_encoder(
    adapter: Adapter, name: str, halves: _Halves, checkpoint: Checkpoint
) -> tuple[Component, ...] | Fault:
    """The encoder that a file was given for: its keys name that one, or all alike none of this base."""
    component = checkpoint.component(name)
    if component is None:
        return _given_inner(adapter, name, checkpoint) or _no_component(adapter, checkpoint)
    for other in halves.encoders.keys() - {name}:
        return _strays(adapter, {other}, {name}, checkpoint)
    owners = {_named(module) for module in halves.rest}
    if len(owners) + len(halves.encoders) > 1:
        return _strays(adapter, {owner or FIRST for owner in owners}, {name}, checkpoint)
    return (component,)


def _given_inner(adapter: Adapter, name: str, checkpoint: Checkpoint) -> tuple[Component, ...] | Fault | None:
    """The model whose file holds the encoder; keys that name anything else are strays."""
    for component in checkpoint.transformers:
        (meant,) = component.encoders_inside(name) or (None,)
        named = {owner for module in adapter.modules if (owner := _named(module))}
        if meant and (others := [o for o in named if meant not in component.encoders_inside(o)]):
            return _strays(adapter, others, {name}, checkpoint)
        if meant:
            return (component,)
    return None


def _unclear(adapter: Adapter, unclear: Mapping[str, tuple[str, ...]]) -> Fault:
    said = "; ".join(f"{name} could be {' or '.join(meant)}" for name, meant in sorted(unclear.items()))
    hint = "Give that half in a file of its own, for one of them: --lora COMPONENT=FILE."
    return _fault(adapter, "ambiguous", f"has keys of a text encoder, and {said}", hint)


def _by_keys(modules: Sequence[Module], checkpoint: Checkpoint) -> tuple[Component, ...]:
    """The transformers that the keys themselves name, when every module's key names one."""
    named = {_named(m) or _plainly_first(m.name) for m in modules}
    if None in named or "transformer_2" not in named:
        return ()
    return tuple(component for component in checkpoint.transformers if component.name in named)


def _plainly_first(module: str) -> str | None:
    return FIRST if any(s.name.startswith(f"{FIRST}.") for s in spellings(module)) else None


def _stray_keys(
    adapter: Adapter, halves: _Halves, models: Sequence[Component], checkpoint: Checkpoint
) -> Fault | None:
    """Keys for an expert that the file was not given for, or a transformer that it has no keys for."""
    given = {component.name for component in models}
    if halves.encoders and not halves.rest:
        return _strays(adapter, halves.encoders.keys(), given, checkpoint)
    owners = _owners(map(_expert, halves.rest))
    if owners == given or all(_one_for_all(owners, component) for component in models):
        return None
    return _strays(adapter, owners, given, checkpoint)


def _strays(
    adapter: Adapter, owners: Collection[str], given: Collection[str], checkpoint: Checkpoint
) -> Fault:
    text = f"has keys for {_and(owners)}, and was given for {_and(given)}"
    hint = "Fuse it into the whole pipeline, or split the file."
    if all(checkpoint.component(name) for name in owners):
        source, alone = adapter.location.spec.source, len(checkpoint.transformers) == 1
        hint = f"Leave the target out: --lora {source}"
        if not alone and not _by_keys(_halves(adapter, checkpoint).rest, checkpoint):
            hint = f"Give it for all of them: --lora all={source}"
    return _fault(adapter, "stray_keys", text, hint)


def _and(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def _no_component(adapter: Adapter, checkpoint: Checkpoint) -> Fault:
    inner = (one.name for component in checkpoint.transformers for one in component.inner)
    names = [*(component.name for component in checkpoint.transformers), *checkpoint.encoders, *inner]
    have = ", ".join(names)
    wanted = adapter.location.spec.component
    return _fault(adapter, "no_component", f"was given for {wanted}, but this base has only {have}", None)


def _wrong_list(adapter: Adapter, checkpoint: Checkpoint) -> Fault:
    n_listed, n_components = adapter.location.spec.listed, len(checkpoint.transformers)
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
