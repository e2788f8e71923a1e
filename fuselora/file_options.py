"""Options for one LoRA of several, ``--alpha`` and ``--lora-layout``: whom their ``[FILE=]`` names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Protocol, TypeVar

from fuselora.errors import Fault

if TYPE_CHECKING:
    from fuselora.resolve import LoraLocation
    from fuselora.specs import LayoutSpec


class FileOption(Protocol):
    """An option whose ``source`` is the LoRA that it is for; None for all."""

    @property
    def source(self) -> str | None: ...


Option = TypeVar("Option", bound=FileOption)


def option_of_each(locations: Sequence[LoraLocation], options: Sequence[Option]) -> dict[str, Option]:
    """The option of each LoRA, by its source: the first that names it, else the first for all."""
    found: dict[str, Option] = {}
    for option in sorted(options, key=lambda option: option.source is None):
        for source in _sources_meant(option, locations):
            found.setdefault(source, option)
    return found


def in_layouts(locations: Sequence[LoraLocation], options: Sequence[LayoutSpec]) -> list[LoraLocation]:
    """The LoRAs, each with the layout that was said for it."""
    said = option_of_each(locations, options)
    layouts = {source: option.layout for source, option in said.items()}
    return [
        replace(at, spec=replace(at.spec, layout=layouts.get(at.spec.source, at.spec.layout)))
        for at in locations
    ]


def misdirected(
    locations: Sequence[LoraLocation], options: Sequence[FileOption], name: str
) -> Iterator[Fault]:
    """Options, called ``name``, that are for no LoRA, could be for several, or are given again."""
    given_for: set[str | None] = set()
    for option in options:
        if option.source in given_for:
            whose = option.source or "all LoRAs"
            yield Fault("repeated", f"{name} is given twice for {whose}", hint="Give it once.")
        given_for.add(option.source)
        sources = _sources_meant(option, locations)
        if not sources:
            given = " or ".join(dict.fromkeys(at.spec.source for at in locations))
            text = f"{name} {option.source}=: no such LoRA was given"
            yield Fault("no_such_lora", text, hint=f"There is {given}.")
        elif option.source is not None and len(sources) > 1:
            text = f"{name} {option.source}=: {len(sources)} LoRAs are called so"
            yield Fault("ambiguous", text, hint=f"Say which: {' or '.join(sources)}.")


def _sources_meant(option: FileOption, locations: Sequence[LoraLocation]) -> tuple[str, ...]:
    """What was given by that very text, else what ends in that name or whose file is called so."""
    given = tuple(dict.fromkeys(at.spec.source for at in locations))
    if option.source is None or option.source in given:
        return given if option.source is None else (option.source,)
    called = (at for at in locations if option.source in (PurePath(at.spec.source).name, at.name))
    return tuple(dict.fromkeys(at.spec.source for at in called))
