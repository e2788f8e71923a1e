"""How exact a merge is, held against float64: every mix of dtypes, one LoRA and several, whole merges.

Weights are N(0, 0.02) and each delta is about a tenth of them. ``equal`` is the share of elements that
are the float64 sum rounded once. ``worst`` is the largest error in units in the last place of the output,
which means little where W and the delta all but cancel; ``of sum`` is therefore what is left of the error
beside the rounding, as a part of |W| + |up| @ |down|. ``two roundings`` is the share when the delta is
rounded to the base's dtype before it is added, as most other tools do.

    python scripts/accuracy.py [--kernel reference] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fuselora
from tests.delta.reference import Values, exact, rounded, ulp

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STD = 0.02
ROOM = 2.0**-20  # of what is summed, on top of one unit in the last place: the promised bound
KEY = "layer.weight"


@dataclass(frozen=True)
class Row:
    """One mix of dtypes. ``beyond`` counts elements outside the promised bound."""

    base: str
    lora: str
    loras: int
    elements: int
    equal: float
    worst_ulps: float
    worst_of_sum: float
    beyond: int
    two_roundings: float


@dataclass(frozen=True)
class Trial:
    """What is merged: ``deltas`` are (up, down) of scale one."""

    weight: torch.Tensor
    deltas: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def sums(self) -> tuple[Values, Values]:
        """In float64 W + the deltas, and how much is summed: |W| + the sum of |up| @ |down|."""
        total = exact(self.weight).copy()
        size = np.abs(total)
        for up, down in self.deltas:
            total += exact(up) @ exact(down)
            size += np.abs(exact(up)) @ np.abs(exact(down))
        return total, size

    def added_in_the_bases_dtype(self) -> torch.Tensor:
        total = self.weight
        for up, down in self.deltas:
            total = total + (up.float() @ down.float()).to(total.dtype)
        return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or JSON; exit status 1 if an element is outside the bound."""
    options = _parser().parse_args(arguments)
    rows = [
        row(base, lora, n_loras, options)
        for base, lora, n_loras in product(DTYPES, DTYPES, (1, options.loras))
    ]
    if options.json:
        print(json.dumps([asdict(found) for found in rows], indent=2))
    else:
        _print_table(rows)
    sys.exit(any(found.beyond for found in rows))


def row(base: str, lora: str, n_loras: int, options: argparse.Namespace) -> Row:
    """One trial, merged and compared."""
    trial = _trial(DTYPES[base], DTYPES[lora], n_loras, options)
    with tempfile.TemporaryDirectory() as folder:
        found = exact(_merged(trial, Path(folder), options.kernel))
    total, size = trial.sums()
    want, step = rounded(total, DTYPES[base]), ulp(total, DTYPES[base])
    error = np.abs(found - total)
    usual = exact(trial.added_in_the_bases_dtype())
    return Row(
        base,
        lora,
        n_loras,
        elements=found.size,
        equal=float((found == want).mean()),
        worst_ulps=float((error / step).max()),
        worst_of_sum=float((np.maximum(error - step / 2, 0) / size).max()),
        beyond=int((error > step + ROOM * size).sum()),
        two_roundings=float((usual == want).mean()),
    )


def _trial(base: torch.dtype, lora: torch.dtype, n_loras: int, options: argparse.Namespace) -> Trial:
    generator = torch.Generator().manual_seed(options.seed)
    size, rank = options.size, options.rank

    def noise(rows: int, columns: int, std: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(std).to(dtype)

    weight = noise(size, size, STD, base)
    std = STD / 10 / rank**0.5
    return Trial(
        weight, tuple((noise(size, rank, 1.0, lora), noise(rank, size, std, lora)) for _ in range(n_loras))
    )


def _merged(trial: Trial, folder: Path, kernel: str) -> torch.Tensor:
    save_file({KEY: trial.weight}, folder / "base.safetensors")
    names = []
    for number, (up, down) in enumerate(trial.deltas):
        names.append(str(folder / f"{number}.safetensors"))
        save_file({"layer.lora_up.weight": up, "layer.lora_down.weight": down}, names[-1])
    fuselora.merge(folder / "base.safetensors", names, folder / "out", kernel=kernel)
    return load_file(folder / "out" / "base.safetensors")[KEY]


def _print_table(rows: Sequence[Row]) -> None:
    names = f"{'base':5} {'LoRA':5} {'LoRAs':>5} {'equal':>10} {'worst':>11} {'of sum':>8}"
    print(f"{names} {'bound':>6} {'two roundings':>14}")
    for found in rows:
        bound = f"{found.beyond} out" if found.beyond else "held"
        of_sum = f"2^{np.log2(found.worst_of_sum):.1f}" if found.worst_of_sum else "0"
        print(
            f"{found.base:5} {found.lora:5} {found.loras:5} {found.equal:10.4%} {found.worst_ulps:11.3f} "
            f"{of_sum:>8} {bound:>6} {found.two_roundings:14.2%}"
        )
    print(f"{rows[0].elements} elements each")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=int, default=2048, help="rows and columns of the weight (default: %(default)s)")
    add("--rank", type=int, default=64)
    add("--loras", type=int, default=4, help="how many beside one alone (default: %(default)s)")
    add("--kernel", choices=("auto", "reference"), default="auto")
    add("--seed", type=int, default=0)
    add("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
