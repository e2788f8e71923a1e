"""``python -m fuselora.marker``: the preflight that needs no other package. Standard library only.

What it takes, prints and exits with is what ``fuselora check`` does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from fuselora.check.folder import check
from fuselora.errors import FuseloraError, InputError, UsageError
from fuselora.escape import json_text, one_line
from fuselora.specs import HUB, LoraSpec, local_path, plain_loras

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

EXIT_CODES = "0 if it is fused and whole and none of the LoRAs is in it, 1 if not, 2 for usage"
HELP = "--help lists what it takes."


def lora_paths(texts: Iterable[str]) -> list[Path]:
    """The files and adapter folders that ``--lora`` names, each text one of them or a comma list.

    A merge's SPEC is refused: contents are compared, whatever the component and strength. Raises
    ``UsageError``, and ``InputError`` for what is not there.
    """
    why = "check compares contents, on every component"
    return [_local(spec) for text in texts for spec in plain_loras(text, why=why)]


def _local(spec: LoraSpec) -> Path:
    path = local_path(spec.source)
    if path is None:
        hub = "Fetch it first: check reads local files." if spec.source.startswith(HUB) else None
        raise InputError(f"{spec.source}: no such file or folder", hint=hub, path=spec.source)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code. Raises ``SystemExit`` for usage, as ``argparse`` does."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser(as_json="--json" in arguments).parse_args(arguments)
    try:
        report = check(options.out, loras=lora_paths(options.lora), digest=options.digest)
    except FuseloraError as error:
        return _failed(error, as_json=options.json)
    except KeyboardInterrupt:
        _write(sys.stderr, "interrupted")
        return 130
    if options.json:
        _write_json(report.document())
    else:
        _write(sys.stdout, *map(one_line, report.lines(options.out)))
    return 0 if report.ok else 1


class _Parser(argparse.ArgumentParser):
    """Usage errors are a JSON document as well, where one was asked for."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        if self.as_json:
            _write_json(UsageError(message, hint=HELP).document())
        super().error(one_line(message))


def _parser(*, as_json: bool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fuselora.marker",
        description="Preflight for CI and container start: fused, whole, and with what?",
        epilog=f"Exit code: {EXIT_CODES}.",
        allow_abbrev=False,
    )
    parser.as_json = as_json
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder that should be fused")
    parser.add_argument(
        "--lora", metavar="FILE", action="append", default=[],
        help="would serving it fuse it twice? file or adapter folder; repeatable",
    )  # fmt: skip
    parser.add_argument("--digest", action="store_true", help="read every byte again")
    parser.add_argument("--json", action="store_true", help="result or refusal as JSON on stdout")
    return parser


def _failed(error: FuseloraError, *, as_json: bool) -> int:
    if as_json:
        _write_json(error.document())
    first, *rest = map(one_line, error.lines)
    hint = [one_line(f"hint: {error.hint}")] if error.hint else []
    _write(sys.stderr, f"error: {first}", *rest, *hint)
    return error.exit_code


def _write_json(document: Mapping[str, object]) -> None:
    sys.stdout.write(json_text(document))


def _write(stream: TextIO, *lines: str) -> None:
    """What the terminal cannot spell is escaped."""
    encoding = stream.encoding or "utf-8"
    for line in lines:
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
