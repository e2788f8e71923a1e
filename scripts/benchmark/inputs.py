"""What the bench merges: full-width Wan blocks, plain layers, and LoRAs for them.

Files are made in a process of their own: it needs torch, and what this process holds in memory would
be counted as the peak of every command that it starts.
"""

from __future__ import annotations

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, product
from typing import TYPE_CHECKING, TypeVar

from fuselora import synth
from fuselora.synth import Spec, WanSize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")
FULL, TINY = synth.SIZES["wan2.2-t2v-a14b"], synth.tiny("wan2.2-t2v-a14b")
WHOLE = 1 << 62  # bytes of a shard: all of it in one file
PREFIX = "base_model.model."  # of a PEFT adapter's keys
DTYPES = {"bf16": "BF16", "f32": "F32"}
ALL_PEERS = ("plain", "diffusers", "peft")
STRENGTHS = (("", (1.0,)), ("", (0.5,) * 4), ("-mixed", (1.0, 0.5, 0.25, -0.25)))


@dataclass(frozen=True, slots=True)
class Wan:
    """A Wan transformer as diffusers stores it; the LoRA has a pair for every linear of a block."""

    size: WanSize

    def base(self, dtype: str) -> tuple[Spec, ...]:
        return synth.base_tensors(self.size, "diffusers", dtype=dtype)

    def lora(self, dtype: str, rank: int) -> tuple[Spec, ...]:
        return synth.lora_tensors(self.size, style="adapter", rank=rank, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Layers:
    """``n_layers`` tensors of (``rows``, ``columns``), each with a pair in the LoRA; no known family."""

    n_layers: int
    rows: int
    columns: int

    def base(self, dtype: str) -> tuple[Spec, ...]:
        shape = (self.rows, self.columns)
        return tuple(Spec(f"layers.{n}.weight", dtype, shape, std=0.02) for n in range(self.n_layers))

    def lora(self, dtype: str, rank: int) -> tuple[Spec, ...]:
        pairs = (
            (
                Spec(f"{PREFIX}layers.{n}.lora_A.weight", dtype, (rank, self.columns), std=0.02),
                Spec(f"{PREFIX}layers.{n}.lora_B.weight", dtype, (self.rows, rank), std=0.01),
            )
            for n in range(self.n_layers)
        )
        return tuple(spec for pair in pairs for spec in pair)


@dataclass(frozen=True, slots=True)
class Case:
    """One mix of inputs. The result is bfloat16 throughout.

    ``strengths``: one for each LoRA. ``only``: LoRA modules start with this. ``peers``: those that can do it.
    """

    name: str
    model: Wan | Layers
    base: str = "bf16"
    lora: str = "bf16"
    rank: int = 64
    strengths: tuple[float, ...] = (1.0,)
    only: str = ""
    shard_bytes: int = WHOLE
    peers: tuple[str, ...] = ()

    def base_specs(self) -> tuple[Spec, ...]:
        return self.model.base(DTYPES[self.base])

    def lora_specs(self) -> tuple[Spec, ...]:
        specs = self.model.lora(DTYPES[self.lora], self.rank)
        return tuple(spec for spec in specs if spec.name.startswith(PREFIX + self.only))

    @property
    def base_bytes(self) -> int:
        return sum(spec.n_bytes for spec in self.base_specs())

    @property
    def lora_bytes(self) -> int:
        """Of one LoRA."""
        return sum(spec.n_bytes for spec in self.lora_specs())


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where a case's files lie; cases share what they have in common."""

    base: Path
    loras: tuple[Path, ...]

    @classmethod
    def of(cls, case: Case, folder: Path) -> Inputs:
        kind = _kind(case)
        suffix = "" if _is_adapter(case) else ".safetensors"
        stem = f"{kind}-{case.only or 'all'}-rank{case.rank}-{case.lora}"
        loras = tuple(folder / f"{stem}-{n}{suffix}" for n, _ in enumerate(case.strengths))
        return cls(folder / f"{kind}-{case.base}", loras)

    @property
    def shards(self) -> list[Path]:
        return sorted(self.base.glob("*.safetensors"))

    @property
    def files(self) -> list[Path]:
        """Every file that a merge reads."""
        folders = (path for path in (self.base, *self.loras) if path.is_dir())
        return [*(p for p in self.loras if p.is_file()), *(p for f in folders for p in sorted(f.iterdir()))]

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.base, *self.loras)

    @property
    def missing(self) -> list[Path]:
        return [path for path in self.paths if not path.exists()]


@dataclass(frozen=True, slots=True)
class Pair:
    """A base with two experts, and a LoRA for each."""

    base: Path
    high: Path
    low: Path
    out: Path


def all_cases(gigabytes: float, *, tiny: bool) -> tuple[Case, ...]:
    """Every mix of dtypes and numbers of LoRAs, and three of their own kind.

    ``gigabytes``: of the Wan base in bfloat16. ``one-tensor``: all but one tensor is only copied.
    ``shards``: 8 shards of 256 MiB. ``rank-256``: 40 tensors of 2048 x 2048.
    """
    wan = Wan(TINY) if tiny else blocks_of(gigabytes)
    mixes = [
        Case(f"{base}+{len(many)}x{lora}{kind}", wan, base, lora, strengths=many, peers=ALL_PEERS)
        for base, (kind, many), lora in product(DTYPES, STRENGTHS, DTYPES)
    ]
    shards = Layers(16, 64, 64) if tiny else Layers(64, 4096, 4096)
    small = Layers(4, 64, 64) if tiny else Layers(40, 2048, 2048)
    others = [
        Case("one-tensor", wan, only="blocks.0.attn1.to_q."),
        Case("shards", shards, shard_bytes=sum(spec.n_bytes for spec in shards.base("BF16")) // 8),
        Case("rank-256", small, rank=256, peers=("float32", "plain")),
    ]
    in_order = sorted((*mixes, *others), key=lambda case: case.base)  # so that each base is made once
    return tuple(replace(case, rank=min(case.rank, 4)) if tiny else case for case in in_order)


def memory_cases(sizes: list[float], lora_sizes: list[float]) -> tuple[Case, ...]:
    """What memory must not follow: the size of the file, of its tensors, and of the LoRA, in GB.

    Tensors vary in a file of the smallest size, LoRAs on the largest.
    """
    least, most = min(sizes), max(sizes)
    files = [Case(f"{size:g} GB", blocks_of(size)) for size in sizes]
    layers = [
        Case(f"{least:g} GB, tensors of {size:g} GB", layers_of(least, size))
        for size in (0.1, 1)
        if size < least
    ]
    largest = Case("", blocks_of(most))
    loras = [
        replace(
            largest,
            name=f"{most:g} GB, LoRA of {size:g} GB",
            rank=round(size * 1e9 * 64 / largest.lora_bytes),
        )
        for size in lora_sizes
    ]
    return (*files, *layers, *loras)


def blocks_of(gigabytes: float) -> Wan:
    """The fewest full-width blocks whose file is that large in bfloat16."""
    sizes = (Wan(FULL.with_blocks(blocks)) for blocks in count(1))
    return next(wan for wan in sizes if sum(spec.n_bytes for spec in wan.base("BF16")) >= gigabytes * 1e9)


def layers_of(gigabytes: float, of_one: float) -> Layers:
    """Tensors of ``of_one`` GB in bfloat16, 5120 columns, as many as fill ``gigabytes``."""
    return Layers(max(1, round(gigabytes / of_one)), round(of_one * 1e9 / 5120 / 2), 5120)


def make(case: Case, inputs: Inputs) -> None:
    """Write what is missing of a case's files."""
    elsewhere(_make, case, inputs)


def make_startup(folder: Path) -> tuple[Pair, Pair]:
    """The demo's tiny pair, and a Wan2.2 pair of true size without data."""
    return elsewhere(_make_startup, folder)


def elsewhere(function: Callable[..., T], *arguments: object) -> T:
    """Call ``function`` in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _make(case: Case, inputs: Inputs) -> None:
    for path in inputs.missing:
        if path == inputs.base:
            _write_base(case, path)
        else:
            _write_lora(case, path, seed=inputs.loras.index(path) + 1)


def _write_base(case: Case, folder: Path) -> None:
    config = synth.config(case.model.size) if isinstance(case.model, Wan) else None
    synth.write_component(
        folder, case.base_specs(), config=config, shard_bytes=case.shard_bytes, fill="repeat"
    )


def _write_lora(case: Case, path: Path, *, seed: int) -> None:
    dtype = DTYPES[case.lora]
    if isinstance(case.model, Wan) and _is_adapter(case):
        synth.write_lora(
            path, case.model.size, style="adapter", rank=case.rank, dtype=dtype, seed=seed, fill="repeat"
        )
    else:
        synth.write_safetensors(path, case.lora_specs(), seed=seed, fill="repeat")


def _make_startup(folder: Path) -> tuple[Pair, Pair]:
    from fuselora.demo import BASE, HIGH, LOW, OUT, run_demo
    from fuselora.progress import Silent

    demo = folder / "demo"
    shutil.rmtree(run_demo(demo, Silent()).merged.out)
    base = synth.write_pipeline(folder / "base", FULL, experts=True, fill="hole")
    high, low = (
        synth.write_lora(folder / f"{role}.safetensors", FULL, rank=64, fill="hole")
        for role in ("high", "low")
    )
    return Pair(demo / BASE, demo / HIGH, demo / LOW, demo / OUT), Pair(base, high, low, folder / "out")


def _is_adapter(case: Case) -> bool:
    """A PEFT adapter's folder, or one file."""
    return isinstance(case.model, Wan) and not case.only


def _kind(case: Case) -> str:
    model = case.model
    if isinstance(model, Wan):
        return f"wan-{model.size.blocks}"
    return f"layers-{model.n_layers}-{model.rows}-{model.columns}"
