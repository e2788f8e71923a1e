"""The plan: for each output file, its header and the ordered steps that fill it. The engine only executes it.

Offsets, order of sums, chunk grid, bytes and memory are all fixed here, from headers. No torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fuselora.digest import tagged
from fuselora.edited_configs import edited_configs
from fuselora.fingerprint import fingerprint_of
from fuselora.header import (
    DTYPE_BITS,
    DTYPE_CODES,
    PAGE,
    Header,
    TensorInfo,
    bytes_by_dtype,
    encode_header,
)
from fuselora.marker import COMPONENT_KEY, FINGERPRINT_KEY
from fuselora.match import FUSABLE, Hit, Matching
from fuselora.naming import Naming, as_base, as_diffusers
from fuselora.reading import reading
from fuselora.serving_notes import NOTHING, ServingNotes
from fuselora.steps import Copy, Delta, Factor, Fuse, Step, chunk_grid, matrix_of

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint, Component
    from fuselora.content import LoraContent
    from fuselora.errors import Notice
    from fuselora.families import Family, Layout
    from fuselora.skeleton import Skeleton
    from fuselora.specs import Request

PENDING = tagged("0" * 64)  # stands for the fingerprint while the LoRA data is unread: same length


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One shard to write. ``n_fused`` counts its tensors that receive a delta, a zero one too."""

    path: PurePosixPath
    base: Header
    header: bytes
    steps: tuple[Step, ...]
    n_bytes: int
    n_fused: int
    n_tensors: int
    in_base_order: bool

    @property
    def header_sha256(self) -> str:
        return hashlib.sha256(self.header).hexdigest()


@dataclass(frozen=True, slots=True)
class Grown:
    """A tensor that has more columns than in the base, and what config.json says otherwise for it."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    config: Mapping[str, int]

    def document(self) -> dict[str, object]:
        shapes = {"from": list(self.before), "to": list(self.after)}
        return {"tensor": self.name, **shapes, "config": dict(self.config)}


@dataclass(frozen=True, slots=True)
class ComponentPlan:
    """One component's files; ``index`` is where its index goes, None for a single file without one."""

    name: str
    role: str
    dtype: str
    index: PurePosixPath | None
    index_metadata: Mapping[str, object]
    weight_map: Mapping[str, str]
    total_size: int
    files: tuple[OutputFile, ...]
    n_tensors: int
    n_fused: int
    grown: tuple[Grown, ...] = ()

    @property
    def bytes_in(self) -> int:
        """Bytes of base weights to read."""
        return sum(file.base.n_bytes for file in self.files)

    @property
    def bytes_out(self) -> int:
        """Bytes of weights to write."""
        return sum(file.n_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class FusePlan:
    """Everything that will be done. ``fingerprint`` is None while the LoRA data has not been read."""

    checkpoint: Checkpoint
    request: Request
    matchings: tuple[Matching, ...]
    contents: tuple[LoraContent, ...] | None
    components: tuple[ComponentPlan, ...]
    edited: Mapping[PurePosixPath, bytes]
    fingerprint: str | None
    notices: tuple[Notice, ...]
    serving: ServingNotes = NOTHING
    skeleton: Skeleton | None = None

    @property
    def rest(self) -> Checkpoint | Skeleton:
        """Where all that is no weights comes from."""
        return self.skeleton or self.checkpoint

    @property
    def fused_steps(self) -> tuple[Fuse, ...]:
        """Everything that is computed, in the order of the files."""
        return tuple(step for file in self.files for step in file.steps if isinstance(step, Fuse))

    @property
    def files(self) -> tuple[OutputFile, ...]:
        return tuple(file for component in self.components for file in component.files)

    @property
    def bytes_out(self) -> int:
        """Bytes of weights to write."""
        return sum(component.bytes_out for component in self.components)

    @property
    def bytes_in(self) -> int:
        """Bytes of base weights to read."""
        return sum(component.bytes_in for component in self.components)


def build_plan(
    checkpoint: Checkpoint,
    matchings: Sequence[Matching],
    contents: Sequence[LoraContent] | None,
    request: Request,
    notices: Sequence[Notice],
    serving: ServingNotes = NOTHING,
    skeleton: Skeleton | None = None,
) -> FusePlan:
    """Lay out every output file. Inputs were checked before; nothing here refuses.

    With a skeleton the output has diffusers' names.
    """
    namings = _namings(checkpoint, skeleton)
    fingerprint = None
    if contents is not None:
        changed = namings if skeleton else None
        fingerprint = fingerprint_of(checkpoint, matchings, contents, request, changed)
    layouts = [
        _ComponentLayout(
            component,
            namings[component.name],
            checkpoint.family,
            checkpoint.layout,
            request,
            _hits_of(component, matchings),
            contents,
        )
        for component in checkpoint.components
    ]
    components = tuple(layout.plan(fingerprint or PENDING) for layout in layouts)
    return FusePlan(
        checkpoint=checkpoint,
        request=request,
        matchings=tuple(matchings),
        contents=tuple(contents) if contents is not None else None,
        components=components,
        edited=edited_configs(checkpoint, skeleton, components, request),
        fingerprint=fingerprint,
        notices=tuple(notices),
        serving=serving,
        skeleton=skeleton,
    )


@dataclass(frozen=True, slots=True)
class PlacedHit:
    """A hit with what the sum needs to know: whose it is, where its tensors lie, and at what strength."""

    hit: Hit
    order: int
    homes: Mapping[str, Header]
    strength: float

    def delta(self, columns: int) -> Delta:
        """On a tensor of so many columns."""
        own_columns = matrix_of(self.hit.wide or self.hit.shape)[1]
        return Delta(
            kind=self.hit.kind,
            factors={part: self._factor(tensor) for part, tensor in self.hit.parts.items()},
            ratio=self.hit.ratio,
            strength=self.strength * self.hit.block,
            settings=self.hit.module.settings,
            rows=self.hit.rows,
            n_rows=self.hit.shape[0] if self.hit.rows else 0,
            n_columns=own_columns if own_columns < columns else 0,
        )

    def _factor(self, tensor: TensorInfo) -> Factor:
        header = self.homes[tensor.name]
        offset = header.data_start + tensor.start
        return Factor(header.path, tensor.name, tensor.dtype, tensor.shape, offset, tensor.n_bytes)


def _hits_of(component: Component, matchings: Sequence[Matching]) -> dict[str, list[PlacedHit]]:
    """A component's hits by base tensor, in the order of the sums."""
    hits: dict[str, list[PlacedHit]] = {}
    for matching in matchings:
        assignment = matching.assignment
        if assignment.component.name != component.name:
            continue
        for hit in matching.hits:
            placed = PlacedHit(hit, assignment.order, assignment.adapter.homes, assignment.strength)
            hits.setdefault(hit.base_key, []).append(placed)
    return hits


@dataclass(frozen=True, slots=True)
class _ComponentLayout:
    """Lays out one component: which tensors are copied, which computed, and where they go."""

    component: Component
    naming: Naming
    family: Family | None
    layout: Layout | None
    request: Request
    hits: Mapping[str, list[PlacedHit]]
    contents: Sequence[LoraContent] | None

    def plan(self, fingerprint: str) -> ComponentPlan:
        placed = list(zip(self.component.shards, self.naming.shards, strict=True))
        files = tuple(self._file(shard, path, fingerprint) for shard, path in placed)
        tensors, names = self.component.tensors(), self.naming.tensors
        sizes = {name: self._n_bytes(self._grown(tensor)) for name, tensor in tensors.items()}
        return ComponentPlan(
            name=self.component.name,
            role=self.component.role,
            dtype=self._main_dtype(sizes),
            index=self.naming.index,
            index_metadata=self.component.index_metadata,
            weight_map={names[t.name]: path.name for shard, path in placed for t in shard.tensors},
            total_size=sum(sizes.values()),
            files=files,
            n_tensors=len(tensors),
            n_fused=len(self.hits),
            grown=tuple(self._growth()),
        )

    def _growth(self) -> Iterator[Grown]:
        for tensor in self.component.tensors().values():
            after = self._grown(tensor).shape
            if self.family and after != tensor.shape:
                name = self.family.canonical_name(tensor.name[len(self.component.prefix) :], self.layout)
                widening, config = self.family.widens[name], self.component.config
                changes = widening.changes(config, tensor.shape[1], after[1])
                yield Grown(self.naming.tensors[tensor.name], tensor.shape, after, changes)

    def dtype_of(self, tensor: TensorInfo) -> str:
        """The output dtype: as stored, unless ``--dtype`` says otherwise and nothing holds it back.

        ``--dtype`` is the transformers'; a text encoder keeps its own.
        """
        start = len(self.component.prefix)
        ours = tensor.name.startswith(self.component.prefix)
        if not self._casts or not ours or tensor.dtype not in FUSABLE:
            return tensor.dtype
        kept = self.family is not None and self.family.keeps_float32(tensor.name[start:], self.layout)
        return tensor.dtype if kept and not self.request.uniform else DTYPE_CODES[self.request.dtype]

    @property
    def _casts(self) -> bool:
        return self.request.dtype != "keep" and not self.component.is_text_encoder

    def _grown(self, tensor: TensorInfo) -> TensorInfo:
        shape = max((p.hit.wide for p in self.hits.get(tensor.name, ()) if p.hit.wide), default=tensor.shape)
        return tensor if shape == tensor.shape else replace(tensor, shape=shape)

    def _n_bytes(self, tensor: TensorInfo) -> int:
        return tensor.n_elements * DTYPE_BITS[self.dtype_of(tensor)] // 8

    def _main_dtype(self, sizes: Mapping[str, int]) -> str:
        """The dtype that holds most of the model's bytes; under ``--dtype``, of those that it is for."""
        tensors = list(self.component.model_tensors())
        if self._casts:
            tensors = [tensor for tensor in tensors if tensor.dtype in FUSABLE] or tensors
        written = bytes_by_dtype((self.dtype_of(tensor), sizes[tensor.name]) for tensor in tensors)
        return next(iter(written), "none")

    def _file(self, shard: Header, path: PurePosixPath, fingerprint: str) -> OutputFile:
        n_fused = sum(tensor.name in self.hits for tensor in shard.tensors)
        placed = tuple(_placed([(self._grown(tensor), self.dtype_of(tensor)) for tensor in shard.tensors]))
        header = self._header(shard, placed, fingerprint if n_fused else None)
        steps = tuple(self._steps(shard, placed, len(header)))
        return OutputFile(
            path=path,
            base=shard,
            header=header,
            steps=steps,
            n_bytes=len(header) + (placed[-1].end if placed else 0),
            n_fused=n_fused,
            n_tensors=len(placed),
            in_base_order=[t.name for t in placed] == [t.name for t in shard.tensors],
        )

    def _header(self, shard: Header, placed: tuple[TensorInfo, ...], fingerprint: str | None) -> bytes:
        """The base's own header bytes where nothing in it changes, else one with the metadata extended."""
        named = tuple(self.naming.renamed(placed))
        metadata = {**shard.metadata, "format": "pt"}
        if fingerprint:
            metadata[FINGERPRINT_KEY] = fingerprint
            metadata[COMPONENT_KEY] = self.component.name
        if metadata == shard.metadata and named == shard.tensors:
            with reading(shard.path), shard.path.open("rb") as stream:
                return stream.read(shard.data_start)
        return encode_header(named, metadata, congruent_to=shard.data_start % PAGE)

    def _steps(self, shard: Header, placed: tuple[TensorInfo, ...], data_start: int) -> Iterator[Step]:
        """Steps in output order; neighbouring copied tensors become one byte range."""
        run: Copy | None = None
        base = shard.by_name()
        for tensor in placed:
            source, target = base[tensor.name], data_start + tensor.start
            step = self._step(shard.path, source, shard.data_start + source.start, tensor, target)
            if isinstance(step, Copy) and run and _adjoins(run, step):
                run = Copy(run.source, run.target, run.n_bytes + step.n_bytes)
                continue
            if run:
                yield run
            run = step if isinstance(step, Copy) else None
            if isinstance(step, Fuse):
                yield step
        if run:
            yield run

    def _step(self, path: Path, base: TensorInfo, source: int, placed: TensorInfo, target: int) -> Step:
        (rows, columns), base_columns = matrix_of(placed.shape), matrix_of(base.shape)[1]
        there = (p for p in self.hits.get(base.name, ()) if not self._is_nothing(p))
        deltas = tuple(placed_hit.delta(columns) for placed_hit in there)
        as_it_is = not deltas and (base.dtype, base.shape) == (placed.dtype, placed.shape)
        if as_it_is or base.n_elements == 0:
            return Copy(source, target, base.n_bytes)
        if deltas and all(delta.settings.experts for delta in deltas):
            rows, columns = math.prod(base.shape[:-1]), base.shape[-1]
            base_columns = columns
        return Fuse(
            path, base.name, base.dtype, placed.dtype, rows, columns, source, target,
            chunk_grid(rows, columns), deltas, base_columns,
        )  # fmt: skip

    def _is_nothing(self, placed: PlacedHit) -> bool:
        """A delta known to be zero is left out, so that the base's bytes stay as they are."""
        zero = self.contents[placed.order].zero if self.contents is not None else ()
        return placed.strength == 0 or placed.hit.is_nothing(zero)


def _adjoins(run: Copy, step: Copy) -> bool:
    return run.source + run.n_bytes == step.source and run.target + run.n_bytes == step.target


def _placed(tensors: Sequence[tuple[TensorInfo, str]]) -> Iterator[TensorInfo]:
    """Tensors with their output dtypes and offsets: in base order where every one stays aligned,
    else the widest dtypes first, as the safetensors library writes them."""
    in_order = list(_laid_out(tensors))
    moved = any(t.dtype != dtype for t, dtype in tensors)
    if not moved or all(t.start % max(1, DTYPE_BITS[t.dtype] // 8) == 0 for t in in_order):
        yield from in_order
    else:
        yield from _laid_out(sorted(tensors, key=lambda pair: -DTYPE_BITS[pair[1]]))


def _laid_out(tensors: Sequence[tuple[TensorInfo, str]]) -> Iterator[TensorInfo]:
    at = 0
    for tensor, dtype in tensors:
        end = at + tensor.n_elements * DTYPE_BITS[dtype] // 8
        yield TensorInfo(tensor.name, dtype, tensor.shape, at, end)
        at = end


def _namings(checkpoint: Checkpoint, skeleton: Skeleton | None) -> dict[str, Naming]:
    family = checkpoint.family if skeleton else None
    return {c.name: as_diffusers(c, family) if family else as_base(c) for c in checkpoint.components}
