"""Tiny fused folders, and one run that writes them the way a merge does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from fuselora.marker import FILE_NAME, SCHEMA, encode
from fuselora.output.disk import write_file
from fuselora.output.journal import BaseState, Entry, Journal, reusable
from fuselora.output.staging import open_stage, prepare, publish

SHARDS = ("transformer/model-00001-of-00002.safetensors", "transformer/model-00002-of-00002.safetensors")
SIDE = ("model_index.json", "vae/config.json")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def marker_bytes(shards: Mapping[str, bytes], side_files: Mapping[str, bytes]) -> bytes:
    def rows(files: Mapping[str, bytes]) -> list[dict[str, object]]:
        return [{"path": p, "bytes": len(c), "sha256": sha256(c), "fused": 0} for p, c in files.items()]

    component = {"dtype": "bfloat16", "tensors": 2, "fused": 1, "copied": 1, "files": rows(shards)}
    lora = {
        "name": "x", "content_sha256": "0" * 64, "component": "transformer", "strength": 1.0,
        "dialect": "lora_A/B", "ranks": [1], "alpha": {"source": "rank", "values": [1.0]}, "scales": [],
        "applied": {"pairs": 1, "diff": 0, "diff_b": 0, "replace": 0}, "skipped": [],
    }  # fmt: skip
    return encode(
        {
            "schema": SCHEMA,
            "tool": {"name": "fuselora", "version": "0"},
            "created": "2026-12-01T12:00:00Z",
            "lora_is_fused": True,
            "fingerprint": f"sha256:{'1' * 64}",
            "base": {"source": "x", "family": None, "layout": None},
            "components": {"transformer": component},
            "side_files": rows(side_files),
            "loras": [lora],
            "warnings": [],
            "math": {"accumulate": "x", "rounding": "x", "device": "cpu", "kernel": "x"},
            "policy": {"distill_lora": "refuse", "dynamic_lora": "allow"},
        }
    )


def contents(tag: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Shards and side files of the output ``tag``; an output's files differ from another's."""
    shards = {path: f"{tag} {path}".encode() for path in SHARDS}
    side = {path: f"{tag} {path}".encode() for path in (*SIDE, f"only-{tag}.txt")}
    return shards, side


def write_fused(folder: Path, tag: str) -> None:
    shards, side = contents(tag)
    for path, content in {**shards, **side, FILE_NAME: marker_bytes(shards, side)}.items():
        write_file(folder / path, content)


def expected(tag: str) -> dict[str, bytes]:
    shards, side = contents(tag)
    return {**shards, **side, FILE_NAME: marker_bytes(shards, side)}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` with its content; a link counts as its target's text."""
    return {
        str(path.relative_to(folder)): str(path.readlink()).encode()
        if path.is_symlink()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def run(
    out: Path,
    base: Path,
    tag: str,
    *,
    overwrite: bool = False,
    restart: bool = False,
    before_publish: Callable[[], None] = lambda: None,
) -> list[str]:
    """Writes the output ``tag`` and publishes it; the shards that an earlier run had finished."""
    stage = prepare(out, inputs=[base], overwrite=overwrite, restart=restart)
    with open_stage(stage) as stage:
        kept = fill(stage.folder, base, tag)
        before_publish()
        publish(stage, overwrite=overwrite)
    return kept


def fill(folder: Path, base: Path, tag: str, *, stop_after: int | None = None) -> list[str]:
    """What a merge does between ``open_stage`` and ``publish``; ``stop_after`` shards it gives up."""
    shards, side = contents(tag)
    kept: list[str] = []
    with Journal.open(folder, f"plan of {tag}", files={*shards, *side}) as journal:
        for at, (path, content) in enumerate(shards.items()):
            if at == stop_after:
                return kept
            entry = journal.finished().get(path)
            if entry and reusable(entry, folder / path, base):
                kept.append(path)
                continue
            state = BaseState.of(base.stat(), sha256(base.read_bytes()))
            write_file(folder / path, content)
            journal.record(Entry(path, len(content), sha256(content), state))
    for path, content in side.items():
        write_file(folder / path, content)
    write_file(folder / FILE_NAME, marker_bytes(shards, side))
    return kept
