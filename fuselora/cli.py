"""The command line: options -> request -> pipeline -> report, and the exit code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional, cast

import typer
from typer.core import TyperGroup

from fuselora import __version__
from fuselora.errors import FuseloraError, UsageError
from fuselora.escape import one_line
from fuselora.interrupts import INTERRUPTED, Interrupts
from fuselora.resources import enough
from fuselora.specs import (
    EMPTY_PATH,
    SHORT_NAMES,
    LoraSpec,
    Request,
    parse_alpha,
    parse_block,
    parse_layout,
    parse_lora,
    place,
)
from fuselora.streams import fill_gaps, tolerant, tolerate

if TYPE_CHECKING:
    from typer._click.core import Context
    from typer._click.exceptions import UsageError as ClickUsageError

    from fuselora.report import Reporter

SHORT_TABLE = "\b\nShort names for --base:\n" + "\n".join(f"  {k:20} {v}" for k, v in SHORT_NAMES.items())
# click's, whichever copy of click typer brings along
USAGE_ERROR = cast("type[ClickUsageError]", typer.BadParameter.__mro__[1])


@contextmanager
def _harmless() -> Iterator[None]:
    """What was typed, or named by a shell's pattern, is shown without its control characters."""
    try:
        yield
    except USAGE_ERROR as error:
        error.message = one_line(error.message)
        raise


class Commands(TyperGroup):
    """With ``--json`` what cannot be read of a command line is a JSON document on stdout too."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Note whether JSON was asked for, whatever else the arguments say."""
        ctx.meta["json"] = "--json" in args
        with _harmless():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> object:
        """Run the command. Raises ``typer.Exit`` with 2 for one that cannot be read."""
        try:
            with _harmless():
                return super().invoke(ctx)
        except USAGE_ERROR as error:
            if not ctx.meta["json"]:
                raise
            with _reporting(json=True):
                hint = "--help after the command lists what it takes."
                raise UsageError(error.format_message(), hint=hint) from None


app = typer.Typer(
    name="fuselora",
    cls=Commands,
    help="Fuse distilled LoRAs into diffusion-transformer checkpoints, offline.",
    epilog=SHORT_TABLE,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def path(text: str | Path) -> Path:
    """What an option names; an empty text, such as a variable that is not set, is not the current folder."""
    if text == "":
        raise typer.BadParameter(EMPTY_PATH)
    return place(text)


class DtypeChoice(str, Enum):
    """``--dtype``."""

    keep = "keep"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class KernelChoice(str, Enum):
    """``--kernel``."""

    auto = "auto"
    reference = "reference"


class LayoutChoice(str, Enum):
    """``--layout``."""

    diffusers = "diffusers"


class AssetsChoice(str, Enum):
    """``--assets``."""

    copy = "copy"
    hardlink = "hardlink"
    symlink = "symlink"
    skip = "skip"


Base = Annotated[str, typer.Option(help="Folder, .safetensors file, Hub id or short name (see --help).")]
Lora = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time on Python 3.10
    typer.Option(metavar="SPEC", help="[COMPONENT=]FILE[:STRENGTH]; HIGH,LOW for experts; repeat to stack."),
]
High = Annotated[
    list[str], typer.Option(metavar="FILE[:STRENGTH]", help="The same as --lora transformer=FILE.")
]
Low = Annotated[
    list[str], typer.Option(metavar="FILE[:STRENGTH]", help="The same as --lora transformer_2=FILE.")
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(parser=path, metavar="PATH", help="New or empty folder [./<base name>-fused]."),
]
Dtype = Annotated[DtypeChoice, typer.Option(help="Dtype of the transformers; text encoders keep theirs.")]
Uniform = Annotated[bool, typer.Option("--uniform", help="Cast also what the model keeps in float32.")]
Variant = Annotated[Optional[str], typer.Option(help="Variant files, such as fp16.")]  # noqa: UP045
Alpha = Annotated[
    list[str], typer.Option(metavar="[FILE=]A", help="Alpha of modules that store none; beats metadata.")
]
Blocks = Annotated[
    list[str],
    typer.Option(metavar="[COMPONENT=]GLOB=S", help="Strength of modules times S, 0 for none; repeatable."),
]
BaseLayout = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="LAYOUT", help="Layout of the base's names and rows, where they do not tell."),
]
LoraLayout = Annotated[
    list[str],
    typer.Option(metavar="[FILE=]LAYOUT", help="The same of a LoRA; repeatable. Layouts: fuselora families."),
]
Unmatched = Annotated[
    list[str], typer.Option(metavar="GLOB", help="LoRA modules that may stay unapplied; repeatable.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Skips and doubtful LoRAs are errors too.")]
Stack = Annotated[bool, typer.Option("--stack", help="Add to a base that is already fused.")]
KernelOption = Annotated[
    KernelChoice, typer.Option("--kernel", help="reference: float64, the same bytes on every machine; slow.")
]
Device = Annotated[str, typer.Option(help="cpu, auto, or a torch device: cuda, cuda:1, xpu, npu, mps.")]
Jobs = Annotated[Optional[int], typer.Option(min=1, help="Threads [all cores].")]  # noqa: UP045
AssetsOption = Annotated[AssetsChoice, typer.Option("--assets", help="The rest of a pipeline.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an OUT that fuselora wrote.")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget a partial run.")]
Digest = Annotated[bool, typer.Option("--digest/--no-digest", help="sha256 of inputs and outputs.")]
Revision = Annotated[Optional[str], typer.Option(help="Hub revision of the base.")]  # noqa: UP045
Layout = Annotated[
    Optional[LayoutChoice],  # noqa: UP045
    typer.Option(help="Write a native base as a diffusers pipeline; needs --skeleton."),
]
Skeleton = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="DIR", help="The diffusers pipeline (or Hub id) that gives configs and all else."),
]
Asked = Annotated[
    list[str],
    typer.Option(metavar="FILE", help="Would serving it fuse it twice? File or adapter folder; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Result or refusal as one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no warnings.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Every place that was matched.")]


def run() -> None:
    """Read the command line, carry it out, and end the process."""
    fill_gaps()
    tolerate()
    # imports make hundreds of thousands of objects, none of them garbage, and looking for it takes time
    gc.set_threshold(100_000, 50, 1000)
    try:
        app()
    except SystemExit as end:
        _leave(end)


def _leave(end: SystemExit) -> NoReturn:
    """Once all is written, without taking Python and torch apart, which takes half a second."""
    if not isinstance(end.code, int):
        raise end
    code = end.code
    sys.stdout.flush()
    if code == 0 and (lost := tolerant(sys.stdout).lost()):
        sys.stderr.write(f"error: stdout: cannot be written: {lost.strerror or lost}\n")
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fuselora {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Fuse distilled LoRAs into diffusion-transformer checkpoints, offline."""


@app.command()
def merge(
    base: Base,
    lora: Lora = None,
    high: High = [],  # noqa: B006 - typer copies defaults
    low: Low = [],  # noqa: B006
    out: Out = None,
    dtype: Dtype = DtypeChoice.keep,
    uniform: Uniform = False,
    variant: Variant = None,
    layout: Layout = None,
    skeleton: Skeleton = None,
    alpha: Alpha = [],  # noqa: B006
    blocks: Blocks = [],  # noqa: B006
    base_layout: BaseLayout = None,
    lora_layout: LoraLayout = [],  # noqa: B006
    allow_unmatched: Unmatched = [],  # noqa: B006
    strict: Strict = False,
    stack: Stack = False,
    device: Device = "cpu",
    kernel: KernelOption = KernelChoice.auto,
    jobs: Jobs = None,
    assets: AssetsOption = AssetsChoice.copy,
    overwrite: Overwrite = False,
    restart: Restart = False,
    digest: Digest = True,
    revision: Revision = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fuse LoRAs into a base and write a new checkpoint with its fused.json."""
    with _reporting(json=json, quiet=quiet, verbose=verbose) as reporter:
        from fuselora.pipeline import merge_request

        asked = Request(
            base=base, loras=_specs(lora or [], high, low), out=out, dtype=dtype.value, uniform=uniform,
            variant=variant, alphas=tuple(map(parse_alpha, alpha)),
            blocks=tuple(map(parse_block, blocks)), allow_unmatched=tuple(allow_unmatched),
            base_layout=base_layout, lora_layouts=tuple(map(parse_layout, lora_layout)),
            strict=strict, stack=stack, device=device, kernel=kernel.value, jobs=jobs, assets=assets.value,
            overwrite=overwrite, restart=restart, digest=digest, revision=revision,
            layout=layout.value if layout else None, skeleton=skeleton,
        )  # fmt: skip
        reporter.merged(merge_request(asked, reporter))


@app.command()
def plan(
    base: Base,
    lora: Lora = None,
    high: High = [],  # noqa: B006
    low: Low = [],  # noqa: B006
    dtype: Dtype = DtypeChoice.keep,
    uniform: Uniform = False,
    variant: Variant = None,
    layout: Layout = None,
    skeleton: Skeleton = None,
    alpha: Alpha = [],  # noqa: B006
    blocks: Blocks = [],  # noqa: B006
    base_layout: BaseLayout = None,
    lora_layout: LoraLayout = [],  # noqa: B006
    allow_unmatched: Unmatched = [],  # noqa: B006
    strict: Strict = False,
    stack: Stack = False,
    device: Device = "cpu",
    kernel: KernelOption = KernelChoice.auto,
    jobs: Jobs = None,
    out: Out = None,
    content: Annotated[bool, typer.Option("--content", help="Read the LoRA data too.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Probe disk and kernel: how long?")] = False,
    revision: Revision = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """What merge would fuse, from headers alone; writes nothing (--estimate: a probe that it removes)."""
    with _reporting(json=json, quiet=quiet, verbose=verbose) as reporter:
        from fuselora.pipeline import estimate_plan, plan_request

        asked = Request(
            base=base, loras=_specs(lora or [], high, low), dtype=dtype.value, uniform=uniform,
            variant=variant, alphas=tuple(map(parse_alpha, alpha)),
            blocks=tuple(map(parse_block, blocks)), allow_unmatched=tuple(allow_unmatched),
            base_layout=base_layout, lora_layouts=tuple(map(parse_layout, lora_layout)),
            strict=strict, stack=stack, device=device, kernel=kernel.value, jobs=jobs, content=content,
            revision=revision, layout=layout.value if layout else None, skeleton=skeleton, out=out,
        )  # fmt: skip
        planned = plan_request(asked, reporter)
        reporter.plan(planned, estimate_plan(planned) if estimate else None)


@app.command()
def inspect(
    paths: Annotated[
        list[Path], typer.Argument(parser=path, metavar="PATH...", help="LoRAs, checkpoints, folders.")
    ],
    json: Json = False,
) -> None:
    """What a LoRA file, a checkpoint or a fused folder is."""
    with _reporting(json=json) as reporter:
        from fuselora.describe import describe_each

        _exit_unless(reporter.described(describe_each(paths)))


@app.command()
def families(json: Json = False) -> None:
    """The model families and layouts whose names and rows are known."""
    with _reporting(json=json) as reporter:
        from fuselora.supported import supported

        reporter.families(supported())


@app.command()
def verify(
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="A fused folder.")],
    base: Annotated[Optional[str], typer.Option(help="The base it was made from.")] = None,  # noqa: UP045
    lora: Annotated[list[str], typer.Option(metavar="FILE", help="The LoRA files; repeatable.")] = [],  # noqa: B006
    skeleton: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DIR", help="The skeleton of a converted one: compare the rest with it."),
    ] = None,
    load: Annotated[bool, typer.Option("--load", help="Load it with diffusers as well.")] = False,
    revision: Revision = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a fused folder's digests; with its inputs, recompute it."""
    with _reporting(json=json, quiet=quiet) as reporter:
        from fuselora.verify import verify as verify_folder

        report = verify_folder(
            out, base=base, loras=lora, skeleton=skeleton, load=load, revision=revision, progress=reporter
        )
        reporter.verified(out, report)
        _exit_unless(report.ok)


@app.command()
def check(
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="A folder that should be fused.")],
    lora: Asked = [],  # noqa: B006
    digest: Annotated[bool, typer.Option("--digest", help="Read every byte again.")] = False,
    json: Json = False,
) -> None:
    """Preflight for CI and container start: fused, whole, and with what?

    Exit code: 0 if it is fused and whole and none of the LoRAs is in it, 1 if not, 2 for usage.
    """
    with _reporting(json=json) as reporter:
        from fuselora.check.command import lora_paths
        from fuselora.check.folder import check as check_folder

        report = check_folder(out, loras=lora_paths(lora), digest=digest)
        reporter.checked(out, report)
        _exit_unless(report.ok)


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(parser=path, metavar="[DIR]")] = Path("fuselora-demo"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a tiny Wan2.2 pair and its LoRAs, merge and verify them."""
    with _reporting(json=json, quiet=quiet) as reporter:
        from fuselora.demo import run_demo

        result = run_demo(folder, reporter)
        reporter.demo(result)
        _exit_unless(result.verified.ok)


@contextmanager
def _reporting(*, json: bool, quiet: bool = False, verbose: bool = False) -> Iterator[Reporter]:
    """A reporter; a refusal or an interruption ends the command with its exit code."""
    from fuselora.report import Reporter

    interrupts = Interrupts()
    reporter = Reporter(json=json, quiet=quiet, verbose=verbose, check=interrupts.check)
    with interrupts.remembered():
        try:
            with enough():
                yield reporter
            reporter.finish()
        except FuseloraError as error:
            reporter.error(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            interrupts.said()
            reporter.interrupted()
            raise typer.Exit(INTERRUPTED) from None
        except Exception:
            # an import can turn an interruption into an error of its own
            if not interrupts.seen:
                raise
            interrupts.said()
            reporter.interrupted()
            raise typer.Exit(INTERRUPTED) from None


def _specs(loras: list[str], high: list[str], low: list[str]) -> tuple[LoraSpec, ...]:
    """All LoRAs in the order of their options. Raises ``UsageError`` when there is none."""
    specs = [spec for text in loras for spec in parse_lora(text)]
    specs += [spec for text in high for spec in parse_lora(f"transformer={text}")]
    specs += [spec for text in low for spec in parse_lora(f"transformer_2={text}")]
    if not specs:
        raise UsageError("no LoRA was given", hint="Give --lora FILE, or --high FILE and --low FILE.")
    return tuple(specs)


def _exit_unless(ok: bool) -> None:
    if not ok:
        raise typer.Exit(1)
