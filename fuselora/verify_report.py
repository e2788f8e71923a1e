"""What ``verify`` found, as data, as JSON and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.check.report import SHOWN_FINDINGS
from fuselora.marker import FILE_NAME

if TYPE_CHECKING:
    from fuselora.compare import ComponentReport
    from fuselora.recorded import Finding


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    ``components`` is empty unless the folder was recomputed; ``digests_checked`` counts the files whose
    sha256 was taken and compared; ``not_compared`` says what was not, for want of an input.
    """

    findings: tuple[Finding, ...]
    components: tuple[ComponentReport, ...]
    digests_checked: int
    not_compared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def document(self) -> dict[str, object]:
        """The report as JSON data."""
        return {
            "ok": self.ok,
            "digests_checked": self.digests_checked,
            "components": [_component_document(part) for part in self.components],
            "not_compared": list(self.not_compared),
            "findings": [
                {"code": f.code, "file": f.file, "tensor": f.tensor, "message": f.message}
                for f in self.findings
            ],
        }

    def lines(self) -> Iterator[str]:
        """The report in words."""
        yield f"digests of {self.digests_checked} files compared with {FILE_NAME}"
        for part in self.components:
            yield (
                f"{part.name}: {part.compared} tensors compared, {part.identical} identical to the base, "
                f"{part.cast} cast, {part.fused} fused within the bound"
            )
            if part.elements:
                yield (
                    f"  {100 * part.share:.4f} % of fused elements equal the float64 sum rounded once; "
                    f"largest error {part.max_ulps:.3g} units in the last place"
                )
        yield from self.not_compared
        for finding in self.findings[:SHOWN_FINDINGS]:
            where = f"{finding.file}: {finding.tensor}" if finding.tensor else finding.file
            yield f"  {where}: {finding.message}"
        if len(self.findings) > SHOWN_FINDINGS:
            yield f"  ... and {len(self.findings) - SHOWN_FINDINGS} more"


def _component_document(part: ComponentReport) -> dict[str, object]:
    return {
        "name": part.name,
        "compared": part.compared,
        "identical": part.identical,
        "cast": part.cast,
        "fused": part.fused,
        "share_equal": part.share,
        "max_ulps": part.max_ulps if part.max_ulps < float("inf") else None,
    }
