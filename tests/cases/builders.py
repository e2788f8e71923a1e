"""The words of the cases as functions: the standard base and LoRA, a run of the command, what it left.

Bases and LoRAs are written, and results read, with the safetensors library. A standard base holds
``Q``, [4, 4] of 1.0, and ``K``, [4, 4] of 2.0; a standard pair's up @ down is 1.0 everywhere, so that
``Q`` becomes 1 + strength * alpha / rank.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.main import get_command

from fuselora.cli import app

Tensors = Mapping[str, torch.Tensor]

COMMAND = get_command(app)

PLAIN = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MODULE = "blocks.0.attn1.to_q"
Q = f"{MODULE}.weight"
K = "blocks.0.attn1.to_k.weight"
NATIVE_MODULE = "blocks.0.self_attn.q"
NATIVE_Q = f"{NATIVE_MODULE}.weight"


# What goes in


def full(*shape: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def save(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    """A file by the safetensors library's own writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata=dict(metadata) if metadata is not None else None)
    return path


def save_json(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def std_tensors(*, native: bool = False) -> dict[str, torch.Tensor]:
    q, k = (NATIVE_Q, "blocks.0.self_attn.k.weight") if native else (Q, K)
    return {q: full(4, 4), k: full(4, 4, value=2.0)}


def base_of(
    root: Path,
    tensors: Tensors,
    *,
    component: str = "transformer",
    config: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A component folder with one weight file and a config, in the pipeline ``root``."""
    save(root / component / WEIGHTS, tensors, metadata)
    save_json(root / component / "config.json", config or {"_class_name": "WanTransformer3DModel"})
    return root


def std_base(root: Path) -> Path:
    return base_of(root, std_tensors())


def sharded_base(root: Path, *shards: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    """A component whose tensors are spread over the shards given, with their index."""
    folder, weight_map = root / "transformer", {}
    for number, tensors in enumerate(shards, 1):
        name = f"diffusion_pytorch_model-{number:05}-of-{len(shards):05}.safetensors"
        save(folder / name, tensors, metadata)
        weight_map.update(dict.fromkeys(tensors, name))
    total = sum(t.numel() * t.element_size() for tensors in shards for t in tensors.values())
    save_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    save_json(folder / "config.json", {"_class_name": "WanTransformer3DModel"})
    return root


def std_pair(
    rank: int,
    module: str = MODULE,
    *,
    alpha: float | torch.Tensor | None = None,
    style: tuple[str, str] = PLAIN,
    out: int = 4,
    into: int = 4,
    value: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """down (rank, into) of ones and up (out, rank) of ``value`` / rank; alpha as a tensor if it is given."""
    down, up = style
    pair = {
        f"{module}.{down}": full(rank, into, dtype=dtype),
        f"{module}.{up}": full(out, rank, value=value / rank, dtype=dtype),
    }
    if alpha is not None:
        pair[f"{module}.alpha"] = alpha if isinstance(alpha, torch.Tensor) else torch.tensor(alpha)
    return pair


# A run


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        return self.stdout + self.stderr


@dataclass(frozen=True)
class Fused:
    """A folder that a run wrote."""

    out: Path
    run: Run

    def tensors(self, component: str = "transformer") -> dict[str, torch.Tensor]:
        """Every tensor of a component, of OUT itself for ``""``."""
        return read_folder(self.out / component)

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.out / "fused.json").read_bytes().decode("utf-8"))
        return document

    @property
    def warnings(self) -> list[dict[str, Any]]:
        warnings: list[dict[str, Any]] = self.document["warnings"]
        return warnings

    @property
    def codes(self) -> list[str]:
        return [warning["code"] for warning in self.warnings]

    @property
    def lora(self) -> dict[str, Any]:
        """The entry of the one LoRA."""
        (entry,) = self.document["loras"]
        assert isinstance(entry, dict)
        return entry

    def warning(self, code: str) -> dict[str, Any]:
        """The one warning of this code, which the terminal also showed."""
        (found,) = [warning for warning in self.warnings if warning["code"] == code]
        assert f"warning: {found['message']}" in self.run.stderr
        return found


def command(*arguments: str | Path) -> Run:
    """``fuselora`` with these arguments. An exception that leaves it ends the test."""
    out, err = _Text(), _Text()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        COMMAND([os.fspath(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return Run(ended.value.code, *(stream.bytes.getvalue().decode("utf-8") for stream in (out, err)))


class _Text(io.TextIOWrapper):
    """A stream that takes what a terminal in UTF-8 would take."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="utf-8", write_through=True)


def merge(base: Path | str, loras: Sequence[Path | str], out: Path, *options: str) -> Run:
    given = [argument for lora in loras for argument in ("--lora", lora)]
    return command("merge", "--base", base, *given, "--out", out, *options)


def fuse(base: Path, *loras: Path | str, out: Path | None = None, options: Sequence[str] = ()) -> Fused:
    """A run that has to succeed; OUT is ``out`` beside the base unless it is given."""
    out = out or base.parent / "out"
    run = merge(base, loras, out, *options)
    assert run.exit_code == 0, run.said
    assert (out / "fused.json").is_file()
    beside = [path.name for path in out.parent.iterdir() if path.name.startswith(out.name)]
    assert [name for name in beside if name.startswith((f"{out.name}.partial", f"{out.name}.old"))] == []
    return Fused(out, run)


def refuse(
    base: Path | str,
    *loras: Path | str,
    says: Sequence[str],
    out: Path | None = None,
    options: Sequence[str] = (),
    beside: Path | None = None,
) -> str:
    """A run that has to fail, for the reasons that ``says`` names: nothing of it may stay behind.

    ``beside`` is the folder in which OUT would be made; returns what was said.
    """
    out = out or (beside or Path(base).parent) / "out"
    before = tree(out.parent)
    run = merge(base, loras, out, *options)
    assert run.exit_code in (1, 2), run.said
    assert "Traceback" not in run.said
    for part in says:
        assert part in run.stderr
    assert tree(out.parent) == before
    return run.said


# What came out


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, no name twice."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata() or {})


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, which tell two NaNs apart."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    same_kind = found.dtype == expected.dtype and found.shape == expected.shape
    return same_kind and raw(found) == raw(expected)


def assert_filled(found: torch.Tensor, value: float) -> None:
    """Every element is exactly ``value``."""
    expected = torch.full_like(found, value)
    assert torch.equal(found, expected), found


def tree(folder: Path) -> dict[str, str]:
    """Every path under a folder, with the digest of each file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace")] = content
    return found
