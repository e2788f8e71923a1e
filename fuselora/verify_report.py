"""What ``verify`` found, as data, as JSON and in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.check.report import SHOWN_FINDINGS
from fuselora.marker import FILE_NAME
from fuselora.plural import many

if TYPE_CHECKING:
    from fuselora.compare import ComponentReport
    from fuselora.loading import Loaded
    from fuselora.recorded import Finding

# Said where an error above one unit would read as a failure.
BOUND = (
    "  (the bound is 1 unit plus 2^-20 of the magnitudes summed, as sums are in float32: "
    "where these cancel that is many units of what is left)"
)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    ``components`` is empty unless the folder was recomputed; ``digests_checked`` counts the files whose
    sha256 was taken and compared; ``not_compared`` says what was not, for want of an input; ``loaded``
    are the components that diffusers loaded without a finding, where it was asked to.
    """

    findings: tuple[Finding, ...]
    components: tuple[ComponentReport, ...]
    digests_checked: int
    not_compared: tuple[str, ...] = ()
    loaded: tuple[Loaded, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def verdict(self) -> str:
        """In words; where nothing could be compared, nothing was found to be wrong either."""
        if self.ok:
            return "verified"
        return "not verified" if {f.code for f in self.findings} == {"no-digests"} else "does not hold"

    def document(self) -> dict[str, object]:
        """The report as JSON data."""
        return {
            "ok": self.ok,
            "digests_checked": self.digests_checked,
            "components": [_component_document(part) for part in self.components],
            "not_compared": list(self.not_compared),
            "loaded": [component.document() for component in self.loaded],
            "findings": [
                {"code": f.code, "file": f.file, "tensor": f.tensor, "message": f.message}
                for f in self.findings
            ],
        }

    def lines(self) -> Iterator[str]:
        """The report in words."""
        yield f"digests of {many(self.digests_checked, 'file')} compared with {FILE_NAME}"
        for part in self.components:
            yield (
                f"{part.name}: {many(part.compared, 'tensor')} compared, "
                f"{part.identical} identical to the base, {part.cast} cast, "
                f"{part.fused} fused within the bound"
            )
            if part.elements:
                yield (
                    f"  {100 * part.share:.4f} % of fused elements equal the float64 sum rounded once; "
                    f"largest error {part.max_ulps:.3g} units in the last place"
                )
        if any(1 < part.max_ulps < float("inf") for part in self.components):
            yield BOUND
        yield from self.not_compared
        yield from (component.text for component in self.loaded)
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
