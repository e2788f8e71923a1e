"""One streaming pass over a LoRA's data: digests, and whether anything in it is non-finite or zero."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.digest import content_digest, read_range
from fuselora.errors import ChangedError, Fault, Notice
from fuselora.reading import changed, reading, state
from fuselora.tensors import TORCH_DTYPES, bytes_finite
from fuselora.zeros import all_zero

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint
    from fuselora.header import Header, TensorInfo
    from fuselora.lora.adapter import Adapter
    from fuselora.match import Hit, Matching
    from fuselora.targets import Assignment


@dataclass(frozen=True, slots=True)
class LoraContent:
    """``sha256`` of the file (None without digests, and of several), of what it holds, and odd tensors."""

    sha256: str | None
    content_sha256: str
    nonfinite: tuple[str, ...]
    zero: frozenset[str]

    def zeroes(self, hit: Hit) -> bool:
        """Whether the hit changes nothing, as its alpha or what its kind multiplies is zero."""
        return hit.is_nothing(self.zero)


@dataclass(frozen=True, slots=True)
class _TensorContent:
    name: str
    sha256: str
    finite: bool
    zero: bool


@dataclass(frozen=True, slots=True)
class _FileContent:
    tensors: tuple[_TensorContent, ...]
    sha256: str | None


def read_content(adapter: Adapter, *, digest: bool, advance: Callable[[int], None]) -> LoraContent:
    """Read every file once; ``advance`` is told the bytes read. Raises ``ChangedError`` or ``ReadError``."""
    digest = digest and len(adapter.files) == 1
    files = [_read_file(header, digest, advance) for header in adapter.files]
    tensors = [tensor for file in files for tensor in file.tensors]
    return LoraContent(
        sha256=files[0].sha256 if digest else None,
        content_sha256=content_digest(adapter.tensors, {t.name: t.sha256 for t in tensors}),
        nonfinite=tuple(t.name for t in tensors if not t.finite),
        zero=frozenset(t.name for t in tensors if t.zero),
    )


def _read_file(header: Header, digest: bool, advance: Callable[[int], None]) -> _FileContent:
    whole = hashlib.sha256()
    tensors: list[_TensorContent] = []
    with reading(header.path), header.path.open("rb") as stream:
        start = stream.read(header.data_start)
        # its alphas were read together with its header
        if hashlib.sha256(start).hexdigest() != header.sha256 or not header.state.is_same(
            state(os.fstat(stream.fileno()))
        ):
            raise changed(header.path)
        whole.update(start)
        for tensor in header.tensors:
            blocks = _observed(read_range(stream, header.data_start + tensor.start, tensor.n_bytes), advance)
            found = _tensor_content(tensor, blocks, whole if digest else None)
            if found is None:
                text = f"{header.path}: was cut short while {tensor.name} was read"
                raise ChangedError(text, path=str(header.path), tensor=tensor.name)
            tensors.append(found)
    return _FileContent(tuple(tensors), whole.hexdigest() if digest else None)


def _observed(blocks: Iterator[bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    for block in blocks:
        advance(len(block))
        yield block


def _tensor_content(
    tensor: TensorInfo, blocks: Iterator[bytes], whole: hashlib._Hash | None
) -> _TensorContent | None:
    """None when the file ends before the tensor does."""
    hasher = hashlib.sha256()
    finite, zero, n_bytes = True, True, 0
    for block in blocks:
        n_bytes += len(block)
        hasher.update(block)
        if whole is not None:
            whole.update(block)
        zero = zero and all_zero(block, tensor.dtype)
        finite = finite and (tensor.dtype not in TORCH_DTYPES or bytes_finite(block, tensor.dtype))
    complete = n_bytes == tensor.n_bytes
    return _TensorContent(tensor.name, hasher.hexdigest(), finite, zero) if complete else None


def content_faults(
    checkpoint: Checkpoint, matchings: Sequence[Matching], contents: Sequence[LoraContent]
) -> tuple[Fault, ...]:
    """Non-finite factors, the same content twice on one component, and what the base already holds."""
    faults: list[Fault] = []
    by_name = {m.assignment.order: m.assignment.adapter for m in matchings}
    for order, adapter in by_name.items():
        for key in contents[order].nonfinite:
            text = f"{key} holds NaN or infinity"
            faults.append(
                Fault("non_finite", text, path=adapter.name, key=key, hint="The LoRA itself is broken.")
            )
    faults += _repeated(matchings, contents)
    faults += _held_by_base(checkpoint, matchings, contents)
    return tuple(faults)


def zero_notices(matchings: Sequence[Matching], contents: Sequence[LoraContent]) -> tuple[Notice, ...]:
    """Which LoRAs hold modules whose delta is zero."""
    notices = []
    for matching in matchings:
        zero = list(filter(contents[matching.assignment.order].zeroes, matching.hits))
        if zero:
            name, n_hits = matching.assignment.adapter.name, len(matching.hits)
            text = f"{name}: the delta is zero in {len(zero)} of {n_hits} modules"
            notices.append(Notice("zero_delta", text, {"lora": name, "zero": len(zero), "of": n_hits}))
    return tuple(notices)


def _repeated(matchings: Sequence[Matching], contents: Sequence[LoraContent]) -> Iterator[Fault]:
    """Twice on one component; or a list that names no expert and whose files are one and the same."""
    seen: dict[tuple[object, str], Matching] = {}
    for matching in matchings:
        assignment = matching.assignment
        spec = assignment.adapter.location.spec
        content = contents[assignment.order].content_sha256
        places: list[object] = [assignment.component.name]
        if spec.listed > 1 and spec.component is None:
            places.append(assignment.order - spec.position)  # the same for all files of one list
        firsts = [seen.setdefault((place, content), matching) for place in places]
        if firsts[0] is not matching:
            yield _twice(firsts[0].assignment, assignment)
        elif firsts[-1] is not matching:
            text = f"holds the same LoRA as {_given(firsts[-1].assignment)}, given twice in one list"
            hint = "For one LoRA on both experts say --lora all=FILE."
            yield Fault("same_lora", text, path=assignment.adapter.name, hint=hint)


def _twice(first: Assignment, second: Assignment) -> Fault:
    where, total = second.component.name, first.strength + second.strength
    text = f"is the same LoRA for {where}, given twice: {_given(first)} and {_given(second)}"
    hint = f"For {where} give it once, with the sum of the strengths, {total:g}."
    if second.component.is_text_encoder and first.adapter.location.spec.component not in (None, where):
        once = f"Give it once, --lora all={first.adapter.location.spec.source}:{first.strength:g}"
        hint = f"{once}; what another expert's strength is times that, --blocks COMPONENT=*=FACTOR says."
    return Fault("same_lora", text, path=second.adapter.name, hint=hint)


def _given(assignment: Assignment) -> str:
    """The file as it was typed, with its component if one was named and its strength."""
    spec = assignment.adapter.location.spec
    return f"{f'{spec.component}=' if spec.component else ''}{spec.source}:{spec.strength:g}"


def _held_by_base(
    checkpoint: Checkpoint, matchings: Sequence[Matching], contents: Sequence[LoraContent]
) -> Iterator[Fault]:
    """``--stack`` adds other LoRAs, never one that is fused already."""
    if checkpoint.marker is None:
        return
    held = {(lora.component, lora.content_sha256): lora for lora in checkpoint.marker.loras if lora.adds}
    for matching in matchings:
        component = matching.assignment.component.name
        lora = held.get((component, contents[matching.assignment.order].content_sha256))
        if lora is not None:
            held_as = f"{lora.name} at strength {lora.strength:g}"
            text = f"is already fused into {component} of this base, as {held_as}"
            hint = "Leave it out. For another strength of it, start from the base that is not fused."
            yield Fault("already_fused", text, path=matching.assignment.adapter.name, hint=hint)
