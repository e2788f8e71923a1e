"""``--blocks``: a factor on the strength of some modules, 0 to leave them out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fuselora.errors import Fault
from fuselora.globs import glob_of, means
from fuselora.lora.grammar import Spelling, spellings
from fuselora.match import Hit, Matching, Skip, plain_name
from fuselora.name_table import flatten
from fuselora.targets import named_component

if TYPE_CHECKING:
    from fuselora.specs import BlockSpec

SHOWN = 3


def blocks_for(component: str, blocks: Sequence[BlockSpec]) -> tuple[BlockSpec, ...]:
    """Those that speak of a component."""
    return tuple(block for block in blocks if block.component in (None, component))


def with_blocks(matching: Matching, blocks: Sequence[BlockSpec]) -> Matching:
    """Each hit with its factor, by the last glob that means it; what has 0 is skipped with that reason."""
    mine = blocks_for(matching.assignment.component.name, blocks)
    if not mine:
        return matching
    meant = [(hit, _last(hit, mine)) for hit in matching.hits]
    hits = tuple(
        replace(hit, block=block.strength) if block else hit
        for hit, block in meant
        if block is None or block.strength != 0
    )
    kept = {hit.module.name for hit in hits}
    left_out: dict[tuple[str, str], Skip] = {}
    for hit, block in meant:
        if block is not None and block.strength == 0:
            part = f"{hit.base_key}: " if hit.module.name in kept else ""
            skip = Skip(hit.module, part + _reason(block), asked=True)
            left_out.setdefault((hit.module.name, part), skip)
    return replace(matching, hits=hits, skipped=(*matching.skipped, *left_out.values()))


def unused_blocks(matchings: Sequence[Matching], blocks: Sequence[BlockSpec]) -> Iterator[Fault]:
    """A glob that means no module is a slip of the pen. ``matchings`` are those before ``with_blocks``."""
    for block in blocks:
        hits = [hit for m in matchings if blocks_for(m.assignment.component.name, [block]) for hit in m.hits]
        if (hits or block.component) and not any(_means(block.glob, hit) for hit in hits):
            encoder = [hit for matching in matchings for hit in _of_encoder(block, matching)]
            yield _unused(block, hits, encoder)


def _of_encoder(block: BlockSpec, matching: Matching) -> list[Hit]:
    """The hits on the text encoder inside the component's file that a block names, with = or in its glob."""
    inside = matching.assignment.component.encoders_inside
    asked = inside(block.component or named_component(block.glob))
    return [h for h in matching.hits if any(one in asked for one in inside(named_component(h.module.name)))]


def _unused(block: BlockSpec, hits: Sequence[Hit], encoder: Sequence[Hit]) -> Fault:
    text = f"--blocks {block.glob} means no module" + (f" of {block.component}" if block.component else "")
    if not hits:
        text = f"--blocks {block.component}={block.glob}: no LoRA is for {block.component}"
        hint = "Name a component of the base that a LoRA was given for."
    elif meant := _ending_in(block.glob, hits):
        hint = f"A glob is for whole names: *{block.glob} would mean {' and '.join(meant)}."
    else:
        hint = f"There are modules like {plain_name(hits[0].module.name)}, in the base {hits[0].base_key}."
    if encoder:
        names = [hit.module.name for hit in encoder]
        hint = f"Its modules lie in another component's file: name them as the LoRA does, {glob_of(names)}"
    return Fault("unused_blocks", text, hint=hint)


def _ending_in(glob: str, hits: Sequence[Hit]) -> list[str]:
    """Modules of the LoRA, or levels of their names, that end as the glob says; a few of them."""
    if not any(_means(f"*{glob}", hit) for hit in hits):
        return []
    names = dict.fromkeys(spellings(hit.module.name)[-1] for hit in hits)
    wanted = (f"*{glob}", f"*{flatten(glob)}")
    found = (
        next((at for at in _levels(name) if any(fnmatchcase(at, g) for g in wanted[: 1 + name.flat])), None)
        for name in names
    )
    meant = list(dict.fromkeys(level for level in found if level))
    return [*meant[:SHOWN], *([f"{len(meant) - SHOWN} more"] if len(meant) > SHOWN else [])]


def _levels(spelling: Spelling) -> Iterator[str]:
    """``a``, ``a.b``, ``a.b.c``; of a flattened name ``a``, ``a_b``, ``a_b_c``."""
    name = spelling.name
    yield from (name[: found.start()] for found in re.finditer("_" if spelling.flat else r"\.", name))
    yield name


def _reason(block: BlockSpec) -> str:
    component = f"{block.component}=" if block.component else ""
    return f"left out by --blocks {component}{block.glob}=0"


def _last(hit: Hit, blocks: Sequence[BlockSpec]) -> BlockSpec | None:
    return next((block for block in reversed(blocks) if _means(block.glob, hit)), None)


def _means(glob: str, hit: Hit) -> bool:
    return means(glob, hit.module.name, hit.base_key)
