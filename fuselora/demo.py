"""A tiny Wan2.2 pair and a LoRA for each expert, merged and verified: the main job in seconds."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuselora import synth
from fuselora.errors import OutputError
from fuselora.filenames import LOCK_ENDING, STAGE_ENDING
from fuselora.marker import read_marker
from fuselora.pipeline import FuseReport, merge
from fuselora.resources import require_current_folder
from fuselora.verify import verify
from fuselora.verify_report import VerifyReport

if TYPE_CHECKING:
    from fuselora.progress import Progress

BASE, OUT = "Wan2.2-tiny", "Wan2.2-tiny-fused"
BY_HAND = "Wan2.2-tiny-by-hand"
HIGH, LOW = "high_noise_model.safetensors", "low_noise_model.safetensors"
SHARD_BYTES = 200_000


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo made and found; ``commands`` do the same by hand, into a folder of their own."""

    folder: Path
    merged: FuseReport
    verified: VerifyReport

    @property
    def commands(self) -> tuple[str, ...]:
        base, out, high, low = (str(self.folder / name) for name in (BASE, BY_HAND, HIGH, LOW))
        merge_it = ("--lora", f"{high},{low}", "--dtype", "bfloat16", "--out", out)
        return (
            shlex.join(("fuselora", "merge", "--base", base, *merge_it)),
            shlex.join(("fuselora", "verify", out, "--base", base, "--lora", high, "--lora", low)),
        )


def run_demo(folder: Path, progress: Progress) -> Demo:
    """Make, merge and verify in ``folder``: an absent or empty one, or an earlier demo, finished or not."""
    require_current_folder()
    _refuse_foreign(folder)
    size = synth.tiny("wan2.2-t2v-a14b")
    base = synth.write_pipeline(folder / BASE, size, experts=True, dtype="F32", shard_bytes=SHARD_BYTES)
    loras = [
        synth.write_lora(folder / name, size, style="lightning", rank=8, alpha=4, dtype="F32", seed=seed)
        for seed, name in enumerate((HIGH, LOW), start=2)
    ]
    merged = merge(
        base,
        [f"transformer={loras[0]}", f"transformer_2={loras[1]}"],
        folder / OUT,
        dtype="bfloat16",
        overwrite=True,
        progress=progress,
    )
    return Demo(folder, merged, verify(merged.out, base=base, loras=loras, progress=progress))


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    stage = (OUT + STAGE_ENDING, OUT + STAGE_ENDING + LOCK_ENDING)
    begun = (folder / BASE).is_dir()
    if begun and {path.name for path in folder.iterdir()} <= {BASE, HIGH, LOW, BY_HAND, *stage}:
        return
    marker = read_marker(folder / OUT) if (folder / OUT).is_dir() else None
    base = marker.raw.get("base") if marker else None
    if not isinstance(base, dict) or base.get("source") != BASE:
        raise OutputError(
            f"{folder}: is not empty and holds no earlier demo",
            hint="Name a new folder: fuselora demo DIR",
            path=str(folder),
        )
