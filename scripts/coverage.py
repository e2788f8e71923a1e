"""Every published LoRA listing on its base, in each layout: how many tensors are applied, skipped, refused.

The files are true-size headers without data (sparse), so the counts are those of the real files.

    python scripts/coverage.py [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuselora.errors import Refused
from fuselora.families import Layout
from fuselora.kinds.kind import ALPHAS
from fuselora.match import Matching
from fuselora.pipeline import plan
from tests import listings

# published for Wan2.2-I2V as well, which lacks the image branch that the file has
ALSO_ON = {"wan2.2-i2v-a14b.x2v-distill-1022.low.r64": "wan2.2-i2v-a14b"}


@dataclass(frozen=True)
class Row:
    """One LoRA on one layout of its base; ``unexplained`` is what no other column accounts for."""

    lora: str
    base: str
    layout: str
    tensors: int
    applied: int
    alpha: int
    skipped: int
    unexplained: int
    faults: int


def coverage(name: str, base: str, layout: Layout, folder: Path) -> Row:
    """Plan one LoRA listing on one base listing, from headers alone."""
    lora_path = folder / f"{name}.safetensors"
    entry = listings.index()[name]
    n_tensors = len(listings.lora(name))
    listings.sparse(lora_path, listings.lora(name), entry.metadata)
    base_path = folder / f"{base}.{layout}.safetensors"
    if not base_path.exists():
        listings.sparse(base_path, listings.base(base, layout))
    try:
        (matching,) = plan(base_path, [f"transformer={lora_path}"]).matchings
    except Refused as refused:
        return Row(name, base, layout, n_tensors, 0, 0, 0, n_tensors, len(refused.faults))
    finally:
        lora_path.unlink()
    return _row(name, base, layout, n_tensors, matching)


def _row(name: str, base: str, layout: str, n_tensors: int, matching: Matching) -> Row:
    applied = {tensor.name for hit in matching.hits for tensor in hit.tensors}
    parts = [(part, tensor) for hit in matching.hits for part, tensor in hit.module.parts.items()]
    alpha = {tensor.name for part, tensor in parts if part in ALPHAS}
    skipped = {tensor.name for skip in matching.skipped for tensor in skip.module.parts.values()}
    unexplained = n_tensors - len(applied) - len(alpha - applied) - len(skipped)
    return Row(name, base, layout, n_tensors, len(applied), len(alpha), len(skipped), unexplained, 0)


def all_rows(folder: Path) -> list[Row]:
    """Each listing on the base it was made for, and on the base it is published for where that differs."""
    rows = []
    for name, entry in sorted(listings.index().items()):
        for base in (entry.base, *filter(None, [ALSO_ON.get(name)])):
            rows += [coverage(name, base, layout, folder) for layout in listings.layouts(base)]
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = all_rows(Path(folder))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(f"{'LoRA':56} {'base':18} {'layout':9} tensors applied alpha skipped unexplained faults")
    for row in rows:
        print(
            f"{row.lora:56} {row.base:18} {row.layout:9} {row.tensors:7} {row.applied:7} {row.alpha:5}"
            f" {row.skipped:7} {row.unexplained:11} {row.faults:6}"
        )


if __name__ == "__main__":
    main()
