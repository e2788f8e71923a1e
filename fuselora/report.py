"""What a command shows: tables and JSON on stdout; progress, warnings and errors on stderr."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from fuselora.check.layout import layout_note
from fuselora.description import SOURCES, Undescribed
from fuselora.errors import FuseloraError, Notice, OutputError
from fuselora.escape import json_text, one_line
from fuselora.header import dtype_name
from fuselora.memory import peak_memory
from fuselora.plural import many, tally
from fuselora.serving_notes import sentence, vllm_omni
from fuselora.streams import Tolerant, tolerant
from fuselora.summary import (
    base_dtype,
    lora_document,
    main_dtype,
    plan_document,
    report_document,
    where,
)

if TYPE_CHECKING:
    from pathlib import Path

    from fuselora.check.report import CheckReport
    from fuselora.demo import Demo
    from fuselora.describe import Description
    from fuselora.estimate import Estimate
    from fuselora.families import RowOrder
    from fuselora.match import Matching
    from fuselora.pipeline import FuseReport
    from fuselora.planning import FusePlan
    from fuselora.supported import Supported
    from fuselora.verify_report import VerifyReport

SHOWN_ROWS = 12
PLAIN_LINE_SECONDS = 10.0
LOG_WIDTH = 10_000
UNITS = ("B", "kB", "MB", "GB", "TB")


class Reporter:
    """One command's output. ``json`` prints one document; ``quiet`` drops progress and warnings."""

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._json, self._quiet, self._verbose = json, quiet, verbose
        self._check = check
        self._stdout = tolerant(sys.stdout)
        self._out, self._err = _console(self._stdout), _console(tolerant(sys.stderr))

    # progress

    @contextmanager
    def phase(self, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        """Announce a piece of work; yields what to call with the bytes done. ``check`` may end it."""
        self._check()
        with self._shown(name, n_bytes) as advance:

            def told(done: int) -> None:
                self._check()
                advance(done)

            yield told

    @contextmanager
    def _shown(self, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        if self._quiet or self._json:
            yield lambda done: None
        elif self._err.is_terminal:
            with _bars(self._err) as bars:
                task = bars.add_task(name, total=n_bytes)
                yield lambda done: bars.advance(task, done)
        else:
            yield _PlainProgress(name, n_bytes, self._note)

    # results

    def plan(self, plan: FusePlan, estimate: Estimate | None = None) -> None:
        if self._json:
            timed = estimate.document() if estimate else None
            return self._document({**plan_document(plan), "estimate": timed})
        self._notices(plan.notices)
        self._plan_tables(plan, places=True)
        self._serving(plan)
        self._float32_hint(plan)
        if plan.contents is None:
            self._line(
                "Pending without --content: non-finite and all-zero tensors, repeated LoRAs, fingerprint."
            )
        if estimate:
            self._line(_estimated(estimate))
        return None

    def merged(self, report: FuseReport) -> None:
        if self._json:
            return self._document(report_document(report))
        self._notices(report.notices)
        self._plan_tables(report.plan, places=self._verbose)
        if report.kept:
            self._line(f"Kept from an earlier run: {many(len(report.kept), 'finished shard')}.")
        rate = report.plan.bytes_out / max(report.seconds, 1e-9)
        self._line(
            f"Wrote {report.out}: {amount(report.plan.bytes_out)} of weights in {report.seconds:.1f} s "
            f"({amount(rate)}/s), fused.json beside them."
        )
        if note := layout_note(report.out, report.marker):
            self._line(note[0].upper() + note[1:] + ".")
        self._serving(report.plan)
        self._vllm_omni(report)
        self._float32_hint(report.plan)
        return None

    def checked(self, out: Path, report: CheckReport) -> None:
        if self._json:
            return self._document(report.document())
        for line in report.lines(out):
            self._line(line)
        return None

    def verified(self, out: Path, report: VerifyReport) -> None:
        if self._json:
            return self._document(report.document())
        for line in report.lines():
            self._line(line)
        self._line(f"{out}: {report.verdict}")
        return None

    def described(self, found: Sequence[Description | Undescribed]) -> bool:
        """What could be read, and then what could not; whether there was nothing of the latter."""
        refused = [one.error for one in found if isinstance(one, Undescribed)]
        if self._json:
            first = refused[0].document() if refused else {}
            self._document({"files": [one.document() for one in found], **first})
        for one in found:
            if not self._json and not isinstance(one, Undescribed):
                self._table(one.title, one.rows())
        for error in refused:
            self._refusal(error)
        return not refused

    def families(self, families: Sequence[Supported]) -> None:
        if self._json:
            return self._document({"families": [family.document() for family in families]})
        for family in families:
            rows = [("models", ", ".join(family.models)), ("layouts", ", ".join(family.layouts))]
            rows += [("told apart", f"{layout}: {what}") for layout, what in family.to_tell.items()]
            if family.few_step:
                rows.append(("few-step LoRAs", ", ".join(row.name for row in family.few_step)))
            self._table(family.family, rows)
        return None

    def demo(self, demo: Demo) -> None:
        if self._json:
            return self._document({**report_document(demo.merged), "verified": demo.verified.ok})
        if self._quiet:
            return self.verified(demo.merged.out, demo.verified)
        self.merged(demo.merged)
        self.verified(demo.merged.out, demo.verified)
        self._line("The same by hand:")
        for command in demo.commands:
            self._line(f"  {command}")
        return None

    def error(self, error: FuseloraError) -> None:
        """The refusal on stderr; with ``--json`` also as the one document on stdout."""
        if self._json:
            self._document(error.document())
        self._refusal(error)

    def _refusal(self, error: FuseloraError) -> None:
        self._err.print(Text.assemble(("error: ", "bold red"), "\n".join(map(one_line, error.lines))))
        if error.hint:
            self._err.print(Text.assemble(("hint: ", "bold"), one_line(error.hint)))

    def finish(self) -> None:
        """Raises ``OutputError`` when the result could not be told; the work itself is done."""
        self._stdout.flush()
        if lost := self._stdout.lost():
            text = f"stdout: cannot be written: {lost.strerror or lost}"
            raise OutputError(text, hint="What was asked for is done; only its report is lost.")

    def interrupted(self) -> None:
        self._err.print("interrupted", style="bold red")

    # parts

    def _plan_tables(self, plan: FusePlan, *, places: bool) -> None:
        checkpoint = plan.checkpoint
        models = ", ".join(checkpoint.models) or "no published size"
        family = checkpoint.family.name if checkpoint.family else "no known family"
        self._line(f"{checkpoint.source}: {models} ({family}, {checkpoint.layout or 'unknown'} names)")
        if checkpoint.row_order:
            self._line(f"  {_order(checkpoint.row_order, '--base-layout')}")
        if plan.skeleton:
            kind = plan.skeleton.pipeline_class or "pipeline"
            self._line(f"written as a diffusers {kind}, all but the weights from {plan.skeleton.source}")
        self._components(plan)
        adapters = {matching.assignment.order: matching.assignment.adapter for matching in plan.matchings}
        names = Counter(adapter.name for adapter in adapters.values())
        for matching in plan.matchings:
            adapter = matching.assignment.adapter
            self._lora(matching, adapter.name if names[adapter.name] == 1 else adapter.location.spec.source)
            if places:
                self._rows(f"{count:>7} x {place}" for place, count in where(matching.hits).items())
        if plan.fingerprint:
            self._line(f"Fingerprint {plan.fingerprint}")

    def _components(self, plan: FusePlan) -> None:
        table = _grid("component", "dtype", "tensors", "fused", "files", "in", "out")
        for component in plan.components:
            role = "" if component.role == "single" else f" ({component.role})"
            before, after = base_dtype(plan, component), dtype_name(component.dtype)
            table.add_row(
                Text(one_line(component.name + role)),
                after if before == after else f"{before} -> {after}",
                str(component.n_tensors),
                str(component.n_fused),
                str(len(component.files)),
                amount(component.bytes_in),
                amount(component.bytes_out),
            )
        self._draw(table)
        self._line(f"Peak memory about {amount(peak_memory(plan))}, whatever the model's size.")

    def _lora(self, matching: Matching, name: str) -> None:
        """``name`` is the file's, or what was typed where two files have the same."""
        document = lora_document(matching)
        applied, scales, skipped = document["applied"], document["scales"], document["skipped"]
        assert isinstance(applied, dict) and isinstance(scales, list) and isinstance(skipped, list)
        n_modules, counts = document["modules"], tally(applied)
        assert isinstance(n_modules, int)
        self._line("")
        self._line(
            f"{name} on {document['component']}, strength {document['strength']:g}: "
            f"{many(n_modules, 'module')}{f' ({counts})' if counts else ''}"
        )
        if matching.row_order:
            self._line(f"  {_order(matching.row_order, '--lora-layout')}")
        self._rows(
            f"  scale {group['scale']:g} = strength * alpha {group['alpha']:g}{_divided(group, document)} "
            f"(alpha from {SOURCES[group['source']]}){_block(group)}: {many(group['modules'], 'module')}"
            for group in scales
        )
        for group in skipped:
            self._line(f"  not applied, {group['reason']}: {many(len(group['modules']), 'module')}")

    def _serving(self, plan: FusePlan) -> None:
        """How to sample with the result, and who says so, where anything is known."""
        if known := sentence(plan.serving.document()):
            self._line(f"To serve: {known}")
        for reason in plan.serving.reasons():
            self._line(f"  {reason}")

    def _vllm_omni(self, report: FuseReport) -> None:
        """What the engine is to be told, of a folder that it loads."""
        plan = report.plan
        is_pipeline = plan.skeleton is not None or plan.checkpoint.container == "pipeline"
        if is_pipeline and plan.request.assets != "skip":
            for number, line in enumerate(vllm_omni(plan.serving.document(), str(report.out))):
                if number == 0:
                    self._line("vLLM-Omni takes none of this from the folder:")
                self._line(f"  {line}")

    def _rows(self, rows: Iterable[str]) -> None:
        """As many lines as a screen bears, all of them with ``--verbose``."""
        lines = list(rows)
        limit = len(lines) if self._verbose else SHOWN_ROWS
        for line in lines[:limit]:
            self._line(line)
        if len(lines) > limit:
            self._line(f"  ... and {len(lines) - limit} more (--verbose shows them)")

    def _table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self._line(title)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(f"  {one_line(name)}"), Text(one_line(value)))
        self._draw(table)

    def _draw(self, table: Table) -> None:
        """A table; in a pipe or file without the blanks that fill its last column."""
        if self._out.is_terminal:
            return self._out.print(table)
        with self._out.capture() as drawn:
            self._out.print(table)
        for line in drawn.get().splitlines():
            self._line(line.rstrip())
        return None

    def _notices(self, notices: Sequence[Notice]) -> None:
        if not self._quiet:
            for notice in notices:
                self._err.print(Text.assemble(("warning: ", "yellow"), one_line(notice.message)))

    def _float32_hint(self, plan: FusePlan) -> None:
        stored = {main_dtype(component) for component in plan.checkpoint.transformers}
        if plan.request.dtype == "keep" and "float32" in stored and not self._quiet:
            text = "the base is stored in float32; --dtype bfloat16 halves it and is what engines load"
            self._err.print(Text.assemble(("hint: ", "bold"), text))

    def _note(self, text: str) -> None:
        self._err.print(Text(one_line(text)))

    def _line(self, text: str) -> None:
        self._out.print(Text(one_line(text)))

    def _document(self, document: Mapping[str, object]) -> None:
        self._stdout.write(json_text(document))


class _PlainProgress:
    """Progress where no bar can be drawn: a line at the start, and one every ten seconds."""

    def __init__(self, name: str, n_bytes: int, write: Callable[[str], None]) -> None:
        self._name, self._n_bytes, self._write = name, n_bytes, write
        self._done, self._started = 0, time.monotonic()
        self._next = self._started + PLAIN_LINE_SECONDS
        write(f"{name}: {amount(n_bytes)}")

    def __call__(self, done: int) -> None:
        self._done += done
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PLAIN_LINE_SECONDS
            rate = self._done / max(now - self._started, 1e-9)
            left = (self._n_bytes - self._done) / max(rate, 1.0)
            self._write(
                f"{self._name}: {amount(self._done)} of {amount(self._n_bytes)}, "
                f"{amount(rate)}/s, {left:.0f} s left"
            )


def amount(n_bytes: float) -> str:
    """Bytes in decimal units, three digits: ``4.21 GB``."""
    value, unit = float(n_bytes), UNITS[0]
    for unit in UNITS:
        if abs(value) < 999.5 or unit == UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def _divided(group: Mapping[str, Any], lora: Mapping[str, Any]) -> str:
    """By the rank or its root, whichever gives the scale; a finished factor is divided by nothing."""
    if group["source"] == "alpha_scale":
        return ""
    whole, rank = lora["strength"] * group["alpha"] * group.get("block", 1.0), group["rank"]
    by_root = rank > 1 and math.isclose(group["scale"] * math.sqrt(rank), whole, rel_tol=1e-6)
    return f" / sqrt(rank {rank})" if by_root and whole else f" / rank {rank}"


def _block(group: Mapping[str, object]) -> str:
    return f" * {group['block']:g} from --blocks" if "block" in group else ""


def _order(order: RowOrder, option: str) -> str:
    """Where a sign decided, the option that overrules it."""
    overrules = "" if order.told_by == option else f"; {option} overrules"
    return f"rows in the order of {order.layout} ({order.told_by}{overrules})"


def _estimated(estimate: Estimate) -> str:
    verb = "are" if estimate.limit == "cores" else "is"
    read, write = amount(estimate.rates.read), amount(estimate.rates.write)
    return (
        f"About {estimate.seconds:.0f} s: the {estimate.limit} {verb} the limit "
        f"(disk {estimate.disk:.0f} s at {read}/s in and {write}/s out, "
        f"cores {estimate.cores:.0f} s, digest {estimate.digest:.0f} s)."
    )


def _console(stream: Tolerant) -> Console:
    """Plain text where NO_COLOR is set. What is no terminal has no width unless COLUMNS says so."""
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    is_log = not stream.isatty()
    said = os.environ.get("COLUMNS", "")
    width = None
    if not said.strip("0"):  # 0 columns are what a terminal says that does not know
        width = LOG_WIDTH if is_log else shutil.get_terminal_size().columns if said else None
    return Console(
        file=cast("TextIO", stream), highlight=False, soft_wrap=is_log, color_system=colors, width=width
    )


def _grid(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number > 0)
    return table


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
