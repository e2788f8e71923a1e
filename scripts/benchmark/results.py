"""Rows become figures: medians, spread and ratios, as a JSON document."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmark.commands import COPY, DIGESTED_COPY, MERGE
from benchmark.sampling import equal_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmark.inputs import Case
    from benchmark.measuring import Row, Sample


@dataclass(slots=True)
class Found:
    """The rows of one case, and what was seen while they ran.

    ``io``: how the engine reads the base and writes. ``math``: of ``fused.json``. ``values``: by command, a
    sample of its result. ``profile``: the lanes of one more merge.
    """

    case: Case
    rows: list[Row] = field(default_factory=list)
    left_out: str | None = None
    io: dict[str, str] = field(default_factory=dict)
    math: dict[str, Any] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    profile: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        case = self.case
        return {
            "case": case.name, "base_dtype": case.base, "base_bytes": case.base_bytes,
            "lora_dtype": case.lora, "lora_bytes": case.lora_bytes, "rank": case.rank,
            "strengths": list(case.strengths), "left_out": self.left_out, "io": self.io, "math": self.math,
            "rows": [self._row(row) for row in self.rows], "profile": self.profile,
        }  # fmt: skip

    def memory_document(self) -> dict[str, Any]:
        samples = [sample for row in self.rows for sample in row.samples]
        return {
            "case": self.case.name, "base_bytes": self.case.base_bytes, "lora_bytes": self.case.lora_bytes,
            "left_out": self.left_out,
            "seconds": samples[0].seconds if samples else None,
            "peak_bytes": samples[0].peak_bytes if samples else None,
        }  # fmt: skip

    def _row(self, row: Row) -> dict[str, Any]:
        name = row.command.name
        return {
            **row_document(row),
            "ratio_to_copy": self._ratio(row, COPY),
            "ratio_to_digested_copy": self._ratio(row, DIGESTED_COPY),
            "equal": equal_share(self.values.get(name, b""), self.values.get(MERGE, b"")),
        }

    def _ratio(self, row: Row, to: str) -> float | None:
        """Of medians."""
        other = next((r for r in self.rows if r.command.name == to), None)
        if other is None or not (row.samples and other.samples):
            return None
        return _seconds(row.samples) / _seconds(other.samples)


def row_document(row: Row) -> dict[str, Any]:
    """One command's figures; None for those of a command that did not run."""
    seconds = [sample.seconds for sample in row.samples]
    return {
        "command": row.command.name,
        "peer": row.command.peer is not None,
        "left_out": row.left_out,
        "median": median(seconds) if seconds else None,
        "min": min(seconds, default=None),
        "max": max(seconds, default=None),
        "cpu_seconds": median(s.cpu_seconds for s in row.samples) if row.samples else None,
        "peak_bytes": max((s.peak_bytes for s in row.samples), default=None),
        "samples": [asdict(sample) for sample in row.samples],
    }


def _seconds(samples: Sequence[Sample]) -> float:
    return median(sample.seconds for sample in samples)
