"""Kernels: how the rows of one tensor are computed, and which kernel a step gets."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from fuselora.delta.adders import Adder, adder
from fuselora.delta.rounding import round_once
from fuselora.delta.sums import FLOAT32 as FLOAT32_SUMS
from fuselora.delta.sums import FLOAT64 as FLOAT64_SUMS
from fuselora.delta.sums import Sums
from fuselora.engine.factors import CPU, Read, read_joined
from fuselora.engine.settings import exact_settings
from fuselora.engine.subnormals import is_base_sound, is_pair_sound
from fuselora.errors import NumericError
from fuselora.families.runs import Run, meeting
from fuselora.steps import UNIT_ROWS, Fuse
from fuselora.tensors import all_finite, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuselora.families.runs import Runs
    from fuselora.specs import Kernel as KernelName
    from fuselora.steps import Delta


SAMPLE_COLUMNS = 1024
MORE_RANGE = "; --dtype bfloat16 or float32 has more range than float16"


@dataclass(frozen=True, slots=True)
class Lost:
    """On a sample of rows: elements that the deltas touched, and those that rounding left as they were."""

    touched: int = 0
    unchanged: int = 0

    def __add__(self, other: Lost) -> Lost:
        return Lost(self.touched + other.touched, self.unchanged + other.unchanged)


class Sum(Protocol):
    """A step with its factors in memory."""

    def rows(self, base: torch.Tensor, out: torch.Tensor, first: int, last: int) -> Lost:
        """Compute rows ``first`` to ``last``; ``out`` may be ``base`` itself."""


class Kernel(Protocol):
    """Arithmetic for the steps that it fits; ``name`` and ``accumulate`` go into the marker."""

    @property
    def name(self) -> str: ...

    @property
    def accumulate(self) -> str: ...

    def fits(self, step: Fuse) -> bool: ...

    def load(self, step: Fuse) -> Sum:
        """Read the step's factors. Raises ``ChangedError`` when a LoRA is not what it was."""


@dataclass(frozen=True)  # without slots, so that its end can be seen
class Loaded:
    """A step, its sum, and where both are said to be wrong."""

    step: Fuse
    sum: Sum

    def fuse(
        self,
        source: memoryview,
        target: memoryview,
        chunks: Sequence[tuple[int, int]],
        check: Callable[[], None] = lambda: None,
    ) -> Lost:
        """Compute neighbouring chunks from base bytes into output bytes, which may be the same.

        Raises ``NumericError`` if any element is not finite, and what ``check`` raises before each chunk.
        """
        start, n_rows = chunks[0][0], chunks[-1][1] - chunks[0][0]
        step, columns = self.step, self.step.columns
        base = view(source, step.base_dtype, n_rows * step.base_columns).view(n_rows, step.base_columns)
        out = view(target, step.dtype, n_rows * columns).view(n_rows, columns)
        lost = Lost()
        for first, last in chunks:
            check()
            rows = slice(first - start, last - start)
            lost += self.sum.rows(_widened(base[rows], columns), out[rows], first, last)
            if not all_finite(out[rows]):
                raise _non_finite(self.step)
        return lost


def _widened(base: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows with zeros behind them, itself where it has all columns."""
    missing = columns - base.shape[1]
    return torch.nn.functional.pad(base, (0, missing)) if missing else base


@dataclass(frozen=True, slots=True)
class Wide:
    """Sums in a wide dtype, rounded once; fits every step."""

    name: str
    sums: Sums
    rounded: Callable[[torch.Tensor, torch.dtype], torch.Tensor]

    @property
    def accumulate(self) -> str:
        return str(self.sums.dtype).removeprefix("torch.")

    def fits(self, step: Fuse) -> bool:
        del step
        return True

    def load(self, step: Fuse) -> Sum:
        return _WideSum(self, adders(step, self.sums))


def adders(step: Fuse, sums: Sums, device: torch.device = CPU) -> tuple[Adder, ...]:
    """What adds each delta of a step, in order."""
    return tuple(adder(delta, Read(delta, step.base, sums.dtype, device), sums) for delta in step.deltas)


@dataclass(frozen=True, slots=True)
class _WideSum:
    kernel: Wide
    adders: tuple[Adder, ...]

    def rows(self, base: torch.Tensor, out: torch.Tensor, first: int, last: int) -> Lost:
        total = _scratch(base.shape, self.kernel.sums.dtype)
        total.copy_(base)
        before = total[:UNIT_ROWS].clone() if first == 0 and self.adders else None
        for add in self.adders:
            add(total, base, first, last)
        out.copy_(self.kernel.rounded(total, out.dtype))
        return count_lost(before, total[:UNIT_ROWS], out[:UNIT_ROWS]) if before is not None else Lost()


@dataclass(frozen=True, slots=True)
class NarrowBf16:
    """bfloat16 base, factors and output in one pass: products and sums in float32, rounded once at the end.

    Several pairs on the same rows become one by joining their ranks, which needs one scale for all; pairs on
    other rows stay apart. Chunks with values that the CPU's bfloat16 instructions would take for zero are
    summed in float32.
    """

    name: str = "bf16-addmm"
    accumulate: str = "float32"

    def fits(self, step: Fuse) -> bool:
        if not step.base_dtype == step.dtype == "BF16" or not step.deltas:
            return False
        pairs = all(d.kind.name == "pair" and d.factors.keys() == {"up", "down"} for d in step.deltas)
        dtypes = {factor.dtype for delta in step.deltas for factor in delta.factors.values()}
        groups = _by_rows(step)
        one_scale = all(len({delta.scale for delta in deltas}) == 1 for deltas in groups.values())
        whole = not any(delta.n_columns for delta in step.deltas)
        return whole and pairs and dtypes == {"BF16"} and one_scale and _apart(groups)

    def load(self, step: Fuse) -> Sum:
        return _Bf16Sum(tuple(_joined(rows, deltas) for rows, deltas in _by_rows(step).items()))


def _by_rows(step: Fuse) -> dict[Runs, list[Delta]]:
    """A step's deltas by the rows that they are for."""
    found: dict[Runs, list[Delta]] = {}
    for delta in step.deltas:
        found.setdefault(delta.rows or (Run(0, 0, step.rows),), []).append(delta)
    return found


def _apart(groups: Iterable[Runs]) -> bool:
    """Whether no row is in two groups, and so is rounded once."""
    runs = sorted(run for rows in groups for run in rows)
    return all(one.first + one.n <= two.first for one, two in pairwise(runs))


def _joined(rows: Runs, deltas: Sequence[Delta]) -> _JoinedPair:
    up = read_joined([delta.factors["up"] for delta in deltas], torch.bfloat16, dim=1)
    down = read_joined([delta.factors["down"] for delta in deltas], torch.bfloat16, dim=0)
    scale = deltas[0].scale
    return _JoinedPair(rows, up, down, scale, is_pair_sound(up, down, scale))


@dataclass(frozen=True, slots=True)
class _JoinedPair:
    """All pairs on some rows of the base, as one. ``sound``: in bfloat16 nothing of it is lost."""

    rows: Runs
    up: torch.Tensor
    down: torch.Tensor
    scale: float
    sound: bool

    def add(self, out: torch.Tensor, first: int, last: int) -> None:
        """Onto rows ``first`` to ``last`` of the base, those that it has."""
        for there, up in self._meeting(first, last):
            out[there].addmm_(up, self.down, alpha=self.scale)

    def add_exact(self, total: torch.Tensor, first: int, last: int) -> None:
        """The same onto float32, in pieces: all of ``down`` would be twice its memory."""
        for there, up in self._meeting(first, last):
            for start in range(0, total.shape[1], SAMPLE_COLUMNS):
                columns = slice(start, start + SAMPLE_COLUMNS)
                down = self.down[:, columns].float()
                FLOAT32_SUMS.add_product(total[there, columns], up.float(), down, self.scale)

    def _meeting(self, first: int, last: int) -> Iterator[tuple[slice, torch.Tensor]]:
        for at, other, n in meeting(self.rows, first, last):
            yield slice(at - first, at - first + n), self.up[other : other + n]


@dataclass(frozen=True, slots=True)
class _Bf16Sum:
    pairs: tuple[_JoinedPair, ...]

    def rows(self, base: torch.Tensor, out: torch.Tensor, first: int, last: int) -> Lost:
        before = base[:UNIT_ROWS].float() if first == 0 else None
        if all(pair.sound for pair in self.pairs) and is_base_sound(base):
            if out.data_ptr() != base.data_ptr():
                out.copy_(base)
            for pair in self.pairs:
                pair.add(out, first, last)
        else:
            out.copy_(self._exact(_scratch(base.shape, torch.float32).copy_(base), first, last))
        if before is None:
            return Lost()
        return count_lost(before, self._exact(before.clone(), 0, len(before)), out[:UNIT_ROWS])

    def _exact(self, total: torch.Tensor, first: int, last: int) -> torch.Tensor:
        for pair in self.pairs:
            pair.add_exact(total, first, last)
        return total


FLOAT32 = Wide("float32", FLOAT32_SUMS, lambda total, dtype: total.to(dtype))
REFERENCE = Wide("reference", FLOAT64_SUMS, round_once)
BF16 = NarrowBf16()


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a run, the first that fits a step computes it; the last fits every step."""

    choices: tuple[Kernel, ...]

    def of(self, step: Fuse) -> Kernel:
        return next(kernel for kernel in self.choices if kernel.fits(step))

    def load(self, step: Fuse) -> Loaded:
        return Loaded(step, self.of(step).load(step))


def choose(name: KernelName) -> Kernels:
    """The kernels that ``--kernel`` allows and that this CPU computes right."""
    if name == "reference":
        return Kernels((REFERENCE,))
    return Kernels((BF16, FLOAT32) if computes_bf16() else (FLOAT32,))


def computes_bf16() -> bool:
    """Whether the CPU has bfloat16 products, and torch's agree with float32 sums rounded once.

    Depends on the type of the CPU and on torch alone, so that two runs choose alike.
    """
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _bf16_agrees()
    except (AttributeError, RuntimeError):  # a build of torch without oneDNN
        return False


def _bf16_agrees() -> bool:
    random = torch.Generator().manual_seed(0)
    rows, columns, rank = 2 * UNIT_ROWS, 320, 24
    up, down, base = (
        torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").bfloat16()
        for shape in ((rows, rank), (rank, columns), (rows, columns))
    )
    with exact_settings():
        found = base.clone().addmm_(up, down, alpha=0.3)
        wanted = base.float().addmm_(up.float(), down.float(), alpha=0.3)
    apart = (found.float() - wanted.bfloat16().float()).abs() > wanted.abs() * 2.0**-7 + 2.0**-16
    return not bool(apart.any()) and float((found == wanted.bfloat16()).float().mean()) > 0.999


_scratches = threading.local()


def _scratch(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Memory that a thread uses again for each chunk: new memory costs more than the sum."""
    held: torch.Tensor | None = getattr(_scratches, "held", None)
    if held is None or held.dtype != dtype or held.numel() < shape.numel():
        held = _scratches.held = torch.empty(shape.numel(), dtype=dtype)
    return held[: shape.numel()].view(shape)


def count_lost(before: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> Lost:
    """Of rows whose float values were ``before`` and are now ``total``, stored as ``out``."""
    touched = total != before
    unchanged = touched & (out == before.to(out.dtype))
    return Lost(int(touched.sum()), int(unchanged.sum()))


def _non_finite(step: Fuse) -> NumericError:
    more = MORE_RANGE if step.dtype == "F16" else ""
    what = "fused tensor" if step.deltas else f"tensor cast to {step.dtype}"
    hint = (
        f"Check the strength and alpha{more}." if step.deltas else f"Leave it as it is, --dtype keep{more}."
    )
    return NumericError(f"{step.base_key}: the {what} is not finite", hint=hint, tensor=step.base_key)
