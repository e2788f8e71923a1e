"""One component of a fused folder against its base: every tensor copied, cast or fused, and rightly so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fuselora.digest import read_range, sha256_file
from fuselora.errors import FormatError, InputError
from fuselora.header import DTYPE_CODES, Header, TensorInfo, main_dtype, read_header
from fuselora.jsonfile import read_json
from fuselora.marker import FILE_NAME, ComponentRecord
from fuselora.match import FUSABLE
from fuselora.recorded import Delta, Finding, Stored

if TYPE_CHECKING:
    from fuselora.checkpoint import Component
    from fuselora.exact import Distance, Files
    from fuselora.progress import Progress

Advance = Callable[[int], None]
Kind = Literal["copied", "cast", "fused"]
# Rounding a float32 sum instead of the float64 one gives another value in far fewer elements than this.
UNEXPLAINED_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class ComponentReport:
    """What was compared in one component, in numbers of tensors.

    ``identical``: copied ones, equal byte for byte. ``cast``: equal to the base rounded once.
    ``fused``: within the bound of the float64 sum; ``elements`` of fused tensors were compared,
    ``equal`` are that sum rounded once, ``max_ulps`` is the largest error in units in the last place.
    """

    name: str
    compared: int
    identical: int
    cast: int
    fused: int
    elements: int
    equal: int
    max_ulps: float

    @property
    def share(self) -> float:
        """Of the fused elements, those equal to the float64 sum rounded once."""
        return self.equal / self.elements if self.elements else 1.0


def compare_component(
    out: Path,
    record: ComponentRecord,
    base: Component,
    keeps_float32: Callable[[str], bool],
    deltas: Mapping[str, Sequence[Delta]],
    progress: Progress,
    base_key: Callable[[str], str] = str,
) -> tuple[ComponentReport | None, list[Finding]]:
    """Recompute one component; no report if its files cannot be read, or hold other tensors than ``base``.

    ``keeps_float32`` says of a tensor's own name whether the model class keeps it in float32, and
    ``base_key`` what a tensor of ``out`` is called in ``base``.
    """
    try:
        shards = [read_header(out / file.path) for file in record.files]
    except InputError as error:
        return None, [Finding("not-compared", record.name, None, error.message)]
    from fuselora.exact import Files

    placed = _placed(shards, base_key)
    run = _Comparison(out, record, base, keeps_float32, deltas, placed, Files())
    findings = [*_index_findings(out, record, shards), *run.name_findings()]
    if any(finding.code == "another-base" for finding in findings):
        return None, findings
    findings += [*run.dtype_findings(), *run.count_findings()]
    verdicts: list[_Verdict] = []
    with progress.phase(f"recompute {record.name}", _tensor_bytes(base)) as advance:
        for shard in base.shards:
            compared, found = run.shard(shard, advance)
            verdicts += compared
            findings += found
    return _report(record.name, verdicts), findings + [v.finding for v in verdicts if v.finding]


def same_bytes(first: Iterable[bytes], second: Iterable[bytes]) -> bool:
    """Whether two streams of equally cut blocks hold the same."""
    return all(ours == theirs for ours, theirs in zip_longest(first, second))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor of OUT and the file it is in."""

    header: Header
    tensor: TensorInfo


@dataclass(frozen=True, slots=True)
class _Verdict:
    kind: Kind
    finding: Finding | None
    distance: Distance | None = None


@dataclass(frozen=True, slots=True)
class _Comparison:
    out: Path
    record: ComponentRecord
    base: Component
    keeps_float32: Callable[[str], bool]
    deltas: Mapping[str, Sequence[Delta]]
    placed: Mapping[str, _Placed]
    files: Files

    def name_findings(self) -> list[Finding]:
        """Tensors that only one side has, or of two shapes; one finding where most are so."""
        base = self.base.tensors()
        name, findings = self.record.name, []
        for key in sorted(base.keys() | self.placed.keys()):
            if key not in self.placed:
                findings.append(Finding("tensor", name, key, "is missing: the base has it"))
            elif key not in base:
                findings.append(self._wrong("tensor", key, "is not in the base"))
            elif self.placed[key].tensor.shape != self._shape(base[key]):
                shapes = f"{list(self.placed[key].tensor.shape)}, in the base {list(base[key].shape)}"
                findings.append(self._wrong("tensor", key, f"has the shape {shapes}"))
        if 2 * len(findings) > len(base):
            text = f"has other tensors than the base given: {len(findings)}, such as {findings[0].tensor}"
            return [Finding("another-base", name, None, text)]
        return findings

    def dtype_findings(self) -> Iterator[Finding]:
        """A dtype is the base's, or where tensors were cast the one that the marker names."""
        wanted = DTYPE_CODES.get(self.record.dtype, self.record.dtype)
        base = self.base.tensors()
        floats = {key for key, tensor in base.items() if self._may_be_cast(tensor) and key in self.placed}
        uniform = all(self.placed[key].tensor.dtype == wanted for key in floats)
        cast = main_dtype(self.base.model_tensors()) != wanted
        for key in base.keys() & self.placed.keys():
            before, after = base[key].dtype, self.placed[key].tensor.dtype
            free = key in floats and (uniform or not self.keeps_float32(key[len(self.base.prefix) :]))
            if after not in ({wanted} if free and cast else {before, wanted} if free else {before}):
                text = f"is {after}, in the base {before}; {FILE_NAME} says {wanted}"
                yield self._wrong("dtype", key, text)

    def count_findings(self) -> Iterator[Finding]:
        """The marker's own numbers of tensors."""
        for what, said, held in (
            ("tensors", self.record.n_tensors, len(self.placed)),
            ("fused tensors", self.record.fused, len(self.deltas)),
        ):
            if said != held:
                text = f"{self.record.name} has {held} {what}, and it says {said}"
                yield Finding("count", FILE_NAME, None, text)

    def shard(self, shard: Header, advance: Advance) -> tuple[list[_Verdict], list[Finding]]:
        """Every tensor of one shard of the base, while another thread takes the shard's digest."""
        recorded = {file.base_sha256 for file in self.record.files}
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(sha256_file, shard.path) if None not in recorded else None
            verdicts = [
                self._verdict(shard, tensor, self.placed[tensor.name], advance)
                for tensor in shard.tensors
                if tensor.name in self.placed and self._comparable(tensor, self.placed[tensor.name].tensor)
            ]
        if digest is None or digest.result() in recorded:
            return verdicts, []
        text = f"is not among the files of the base that {FILE_NAME} records for {self.record.name}"
        return verdicts, [Finding("another-base", str(shard.path), None, text)]

    def _verdict(self, shard: Header, tensor: TensorInfo, placed: _Placed, advance: Advance) -> _Verdict:
        key = tensor.name
        if key not in self.deltas and tensor.dtype == placed.tensor.dtype:
            same = _same_tensors(shard, tensor, placed, advance)
            wrong = self._wrong("copied", key, "is not the base's, byte for byte")
            return _Verdict("copied", None if same else wrong)
        from fuselora.exact import measure

        base, out = Stored(shard.path, key), Stored(placed.header.path, placed.tensor.name)
        distance = measure(base, out, self.deltas.get(key, ()), advance, self.files)
        if key in self.deltas:
            return _Verdict("fused", self._fused_fault(key, distance), distance)
        n_wrong = distance.elements - distance.equal
        text = f"{n_wrong} of {distance.elements} elements are not the base's, rounded once"
        return _Verdict("cast", self._wrong("cast", key, text) if n_wrong else None)

    def _fused_fault(self, key: str, distance: Distance) -> Finding | None:
        of = f"of {distance.elements} elements"
        if distance.beyond:
            off = f"off the float64 sum by more than the bound, by up to {distance.max_ulps:.3g} ulps"
            return self._wrong("bound", key, f"{distance.beyond} {of} are {off}")
        if distance.unexplained > UNEXPLAINED_SHARE * distance.elements:
            text = f"{distance.unexplained} {of} are within the bound, yet not the float64 sum rounded once"
            return self._wrong("rounding", key, text)
        return None

    def _wrong(self, code: str, key: str, message: str) -> Finding:
        placed = self.placed[key]
        file = placed.header.path.relative_to(self.out).as_posix()
        return Finding(code, file, placed.tensor.name, message)

    def _may_be_cast(self, tensor: TensorInfo) -> bool:
        return tensor.dtype in FUSABLE and tensor.name.startswith(self.base.prefix)

    def _shape(self, tensor: TensorInfo) -> tuple[int, ...]:
        """Of a base tensor in the output: its own, or what a LoRA makes it grow to."""
        return max((d.wide for d in self.deltas.get(tensor.name, ()) if d.wide), default=tensor.shape)

    def _comparable(self, tensor: TensorInfo, placed: TensorInfo) -> bool:
        return self._shape(tensor) == placed.shape and (
            tensor.dtype == placed.dtype or {tensor.dtype, placed.dtype} <= FUSABLE
        )


def _tensor_bytes(base: Component) -> int:
    return sum(tensor.n_bytes for tensor in base.tensors().values())


def _placed(shards: Iterable[Header], base_key: Callable[[str], str]) -> dict[str, _Placed]:
    """The tensors of OUT by what the base calls them."""
    return {base_key(tensor.name): _Placed(shard, tensor) for shard in shards for tensor in shard.tensors}


def _index_findings(out: Path, record: ComponentRecord, shards: Sequence[Header]) -> Iterator[Finding]:
    """The index places every tensor where it is, and knows their size."""
    if record.index is None:
        if len(shards) > 1:
            yield Finding("index", record.name, None, "has several weight files and no index")
        return
    try:
        document = read_json(out / record.index)
    except FormatError as error:
        yield Finding("index", record.index, None, error.message)
        return
    tensors = [(tensor, shard.path.name) for shard in shards for tensor in shard.tensors]
    if document.get("weight_map") != {tensor.name: file for tensor, file in tensors}:
        yield Finding("index", record.index, None, "its weight_map is not where the tensors are")
    total, metadata = sum(tensor.n_bytes for tensor, _ in tensors), document.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("total_size") != total:
        yield Finding("index", record.index, None, f"its total_size is not {total}")


def _same_tensors(shard: Header, tensor: TensorInfo, placed: _Placed, advance: Advance) -> bool:
    with shard.path.open("rb") as theirs, placed.header.path.open("rb") as ours:
        first = read_range(theirs, shard.data_start + tensor.start, tensor.n_bytes)
        second = read_range(ours, placed.header.data_start + placed.tensor.start, tensor.n_bytes)
        same = same_bytes(first, second)
    advance(tensor.n_bytes)
    return same


def _report(name: str, verdicts: Sequence[_Verdict]) -> ComponentReport:
    from fuselora.exact import Distance

    right = Counter(verdict.kind for verdict in verdicts if verdict.finding is None)
    total = sum((v.distance for v in verdicts if v.distance is not None), Distance())
    return ComponentReport(
        name=name,
        compared=len(verdicts),
        identical=right["copied"],
        cast=right["cast"],
        fused=right["fused"],
        elements=total.elements,
        equal=total.equal,
        max_ulps=total.max_ulps,
    )
