"""Tensor lists of published checkpoints and LoRA files at true size, and small files made from them.

``listings/*.tsv.gz`` hold one tensor a line: name, dtype, comma-separated shape. ``index.json`` says
for each LoRA which base it was made for, its rank, the alpha that applies to it wherever that is
stored (null: the rank) and its metadata; and it holds the bases' configs.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuselora.synth import SIZES, Spec, WanSize, base_tensors, tiny, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fuselora.families import Layout

LISTINGS = Path(__file__).parent / "listings"
RANK_AXES = ((re.compile(r"\.lora_(down|A)\b"), 0), (re.compile(r"\.lora_(up|B)\b"), 1))
PEFT_ONLY = frozenset(
    f"wan2.2-t2v-a14b.peft-{kind}" for kind in ("dora.r16", "lora_bias.r16", "patterns-rslora")
)
BLOCK = re.compile(r"blocks[._](\d+)[._]")


@dataclass(frozen=True, slots=True)
class Entry:
    """What ``index.json`` says of one LoRA; ``base`` is a list's name, and for Wan one in ``SIZES``."""

    base: str
    layout: Layout
    rank: int
    alpha: float | None
    metadata: dict[str, str] | None
    peft_config: dict[str, Any] | None


@cache
def index() -> Mapping[str, Entry]:
    return {name: Entry(**entry) for name, entry in _document()["loras"].items()}


def wan() -> Mapping[str, Entry]:
    """Those of Wan that are pairs and differences alone, of which tiny ones can be made."""
    return {name: e for name, e in index().items() if e.base in SIZES and name not in PEFT_ONLY}


def layouts(base: str) -> tuple[Layout, ...]:
    """Those that there is a list of a base in."""
    return tuple(
        layout for layout in ("native", "diffusers") if (LISTINGS / f"{base}.{layout}.tsv.gz").exists()
    )


def others() -> tuple[tuple[str, Layout], ...]:
    """(base, layout) of the lists of other families' bases."""
    names = (path.name.removesuffix(".tsv.gz") for path in sorted(LISTINGS.glob("*.tsv.gz")))
    found = (name.rpartition(".") for name in names if name not in index())
    return tuple((base, layout) for base, _, layout in found if base not in SIZES)


def config(name: str) -> dict[str, Any]:
    """``config.json`` of a base, in diffusers' form."""
    return dict(_document()["configs"][name])


def base(name: str, layout: Layout) -> tuple[Spec, ...]:
    return _listing(f"{name}.{layout}")


def lora(name: str) -> tuple[Spec, ...]:
    return _listing(name)


def rows(specs: Iterable[Spec]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each, for comparisons that values have no part in."""
    return [(spec.name, spec.dtype, spec.shape) for spec in specs]


def sparse(path: Path, specs: Iterable[Spec], metadata: Mapping[str, str] | None = None) -> Path:
    """A file of true size with a real header and a hole for data."""
    return write_safetensors(path, specs, metadata=metadata, fill="hole")


def tiny_lora(path: Path, name: str, *, blocks: int = 2, divisor: int = 16, seed: int = 0) -> Path:
    """The LoRA ``name`` shrunk to fit ``tiny(index()[name].base, blocks)``, with real values.

    Tensors of further blocks are left out, ranks divided by ``divisor``; alpha stays as it is. One
    with a peft config becomes a folder at ``path``, any other a file.
    """
    entry = index()[name]
    kept = [spec for spec in lora(name) if _block_number(spec.name) < blocks]
    small = scaled(kept, widths(SIZES[entry.base], tiny(entry.base, blocks)), divisor)
    specs = [_with_values(spec, entry.alpha) for spec in small]
    metadata = _small_metadata(entry.metadata or {}, divisor)
    if entry.peft_config is None:
        return write_safetensors(path, specs, seed=seed, metadata=metadata)
    write_safetensors(path / "adapter_model.safetensors", specs, seed=seed, metadata=metadata)
    peft = {**entry.peft_config, "r": _small_rank(entry.peft_config["r"], divisor)}
    (path / "adapter_config.json").write_text(json.dumps(peft, indent=2) + "\n")
    return path


def widths(full: WanSize, small: WanSize) -> dict[int, int]:
    """Each length of the full base's axes -> the small one's, from a block and all that is outside."""
    found: dict[int, int] = {}
    for large, little in zip(
        base_tensors(full.with_blocks(1)), base_tensors(small.with_blocks(1)), strict=True
    ):
        for n, shrunk in zip(large.shape, little.shape, strict=True):
            assert found.setdefault(n, shrunk) == shrunk, f"{n} becomes {shrunk} and {found[n]}"
    return found


def scaled(specs: Iterable[Spec], dims: Mapping[int, int], divisor: int) -> tuple[Spec, ...]:
    """LoRA tensors with ranks divided by ``divisor`` and every other length mapped through ``dims``."""
    return tuple(replace(spec, shape=_scaled_shape(spec, dims, divisor)) for spec in specs)


def _scaled_shape(spec: Spec, dims: Mapping[int, int], divisor: int) -> tuple[int, ...]:
    axis = _rank_axis(spec.name)
    return tuple(
        _small_rank(n, divisor) if at == axis else dims[n] if n > 6 else n for at, n in enumerate(spec.shape)
    )


def _rank_axis(name: str) -> int | None:
    return next((axis for pattern, axis in RANK_AXES if pattern.search(name)), None)


def _small_rank(rank: int, divisor: int) -> int:
    return max(1, rank // divisor)


def _block_number(name: str) -> int:
    found = BLOCK.search(name)
    return int(found.group(1)) if found else 0


def _with_values(spec: Spec, alpha: float | None) -> Spec:
    """Noise such that a delta is about a tenth of a synthetic base's weight, and a difference less."""
    if spec.name.endswith(".alpha"):
        assert alpha is not None, spec.name
        return replace(spec, mean=alpha)
    axis = _rank_axis(spec.name)
    if axis == 0:
        return replace(spec, std=spec.shape[1] ** -0.5)
    if axis == 1:
        rank = spec.shape[1]
        return replace(spec, std=0.1 / ((alpha or rank) / rank * rank**0.5))
    return replace(spec, std=0.002)


def _small_metadata(metadata: Mapping[str, str], divisor: int) -> dict[str, str]:
    found = dict(metadata)
    if "ss_network_dim" in found:
        found["ss_network_dim"] = str(_small_rank(int(found["ss_network_dim"]), divisor))
    if "lora_adapter_metadata" in found:
        entries = json.loads(found["lora_adapter_metadata"])
        entries["transformer.r"] = _small_rank(entries["transformer.r"], divisor)
        found["lora_adapter_metadata"] = json.dumps(entries, indent=2, sort_keys=True)
    return found


@cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LISTINGS / "index.json").read_text())
    return found


@cache
def _listing(name: str) -> tuple[Spec, ...]:
    text = gzip.decompress((LISTINGS / f"{name}.tsv.gz").read_bytes()).decode()
    return tuple(_spec(*line.split("\t")) for line in text.splitlines())


def _spec(name: str, dtype: str, shape: str) -> Spec:
    return Spec(name, dtype, tuple(int(n) for n in shape.split(",")) if shape else ())
