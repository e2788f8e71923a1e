"""What a merge costs beside copying the file: time, memory, and where the time goes.

Makes full-width Wan blocks and LoRAs of rank 64 in a temporary folder, then runs, in turn and in one run,
``cp`` + fsync, the same and a sha256 of the copy, ``fuselora merge`` with digests and without (the whole
process), and other tools that reach the same result. Before each of them the last output is removed,
what waits to be written is written, and the inputs leave the page cache (``--cache warm``: are read).
Free memory is touched as well: a virtual machine may have given it back to its host, and then ``cp`` takes
twice as long as right after another ``cp`` (``--no-touch`` leaves it as it comes).

Ratios are of medians, to ``cp`` + fsync and to the same with a digest of the copy. ``equal`` is the share of
a few thousand fused elements with the same bits as in ``fuselora merge``; rounding twice leaves about
0.9. No peak of memory is below that of this script, some 30 MB.

A case is BASE+NUMBERxLORA: ``bf16+1xbf16``, ``f32+4xf32``, ``bf16+4xbf16-mixed`` (of different strengths);
and ``one-tensor`` (the rest is only copied), ``shards`` (8 of 256 MiB, each tensor fused) and ``rank-256``
(40 tensors of 2048 x 2048). Examples::

    # `make bench`: a few minutes, 6 GB of disk
    python scripts/bench.py --gigabytes 1 --cases bf16+1xbf16,f32+1xbf16 --rounds 3 \\
        --float32-rounds 1 --peer-cases bf16+1xbf16 --peer-rounds 1

    # everything at full size: hours, 40 GB of disk, and 14 GB of memory or peers are left out
    python scripts/bench.py --jobs 1,2 --memory 4,8,16 --profile --json bench.json

    # one case alone, and where its time goes
    python scripts/bench.py --cases bf16+1xbf16 --peers none --no-startup --profile
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark.commands import PEERS
from benchmark.inputs import Case, all_cases
from benchmark.measuring import CommandFailed, Turns, can_forget, can_touch
from benchmark.running import Bench, Choice
from benchmark.tables import text

STDOUT = "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or JSON; exit status 1 if a copy or a merge fails."""
    parser = _parser()
    options = parser.parse_args(arguments)
    choice = _choice(parser, options)
    signal.signal(signal.SIGTERM, _stop)
    try:
        with _folder(options.work, keep=options.keep) as work:
            document = Bench(choice, work).document()
    except CommandFailed as error:
        sys.exit(f"error: {error}")
    if options.json != STDOUT:
        print(text(document))
    if options.json == STDOUT:
        print(json.dumps(document, indent=2))
    elif options.json:
        Path(options.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _stop(number: int, frame: object) -> NoReturn:
    """SIGTERM ends the run as an error does, its folder removed."""
    del frame
    sys.exit(128 + number)


def _choice(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Choice:
    if options.cache == "cold" and not can_forget():
        parser.error("files cannot be dropped from the page cache here: use --cache warm")
    cases = all_cases(options.gigabytes, tiny=options.tiny)
    rounds = options.rounds or (1 if options.tiny else 5)
    return Choice(
        cases=_chosen(parser, cases, options.cases),
        peers=options.peers,
        peer_cases=frozenset(case.name for case in _chosen(parser, cases, options.peer_cases)),
        jobs=options.jobs,
        device=options.device,
        cache=options.cache,
        touch=options.touch and can_touch(),
        startup=options.startup,
        warm_up=not options.tiny,
        memory=options.memory,
        memory_loras=options.memory_loras,
        profile=options.profile,
        reserve_bytes=int(options.reserve * 1e9),
        turns=_turns(options, rounds),
        float32_turns=_turns(options, options.float32_rounds or rounds),
        keep=options.keep,
    )


def _turns(options: argparse.Namespace, rounds: int) -> Turns:
    return Turns(rounds, options.peer_rounds or rounds, options.limit)


def _chosen(parser: argparse.ArgumentParser, cases: Sequence[Case], patterns: list[str]) -> tuple[Case, ...]:
    """Cases whose name fits a pattern, in their own order."""
    for pattern in patterns:
        if not any(fnmatch(case.name, pattern) for case in cases):
            parser.error(f"no case is called {pattern}; there are {', '.join(case.name for case in cases)}")
    return tuple(case for case in cases if any(fnmatch(case.name, pattern) for pattern in patterns))


@contextmanager
def _folder(parent: Path, *, keep: bool) -> Iterator[Path]:
    """A new folder in ``parent``, removed at the end unless ``keep``."""
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="fuselora-bench-", dir=parent)).resolve()
    try:
        yield work
    finally:
        if keep:
            print(f"inputs are in {work}", file=sys.stderr)
        else:
            shutil.rmtree(work)


def _names(value: str) -> list[str]:
    return [] if value == "none" else value.split(",")


def _peers(value: str) -> list[str]:
    names = _names(value)
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(PEERS)}")
    return names


def _number(value: str) -> int:
    if int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return int(value)


def _numbers(value: str) -> list[int]:
    return [_number(number) for number in value.split(",")]


def _sizes(value: str) -> list[float]:
    return [float(number) for number in value.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--gigabytes",
        type=float,
        default=4,
        metavar="GB",
        help="of the base in bfloat16 [4]; float32 has twice",
    )
    add("--cases", type=_names, default=["*"], metavar="NAME,...", help="names may be patterns [*]")
    add("--rounds", type=_number, help="runs of each command [5; 1 with --tiny]")
    add(
        "--peers",
        type=_peers,
        default=list(PEERS),
        metavar="NAME,...",
        help=f"of {', '.join(PEERS)}, or none [all]",
    )
    add("--peer-cases", type=_names, default=["*+1xbf16", "rank-256"], metavar="NAME,...",
        help="the cases that peers take part in [*+1xbf16,rank-256]")  # fmt: skip
    add("--float32-rounds", type=_number, help="of a float32 base [as --rounds]")
    add("--peer-rounds", type=_number, help="runs of each peer [as --rounds]")
    add("--jobs", type=_numbers, default=[], metavar="N,...", help="also merge with so many threads")
    add("--device", help="merge with --device DEVICE")
    add(
        "--cache",
        choices=("cold", "warm"),
        default="cold",
        help="whether inputs are in the page cache [cold]",
    )
    add("--touch", action=argparse.BooleanOptionalAction, default=True, help="touch free memory before [yes]")
    add("--startup", action=argparse.BooleanOptionalAction, default=True, help="measure start-up [yes]")
    add(
        "--memory",
        type=_sizes,
        default=[],
        metavar="GB,...",
        help="also the peak memory of files of these sizes",
    )
    add("--memory-loras", type=_sizes, default=[0.1, 5], metavar="GB,...", help="and of these LoRAs [0.1,5]")
    add("--profile", action="store_true", help="also where the time of one more merge goes")
    add("--work", type=Path, default=Path(), metavar="DIR", help="where the temporary folder is made [.]")
    add("--keep", action="store_true", help="leave the inputs there")
    add("--reserve", type=float, default=2, metavar="GB", help="disk space to leave free [2]")
    add("--limit", type=float, default=1800, metavar="SECONDS", help="of one run [1800]")
    add("--tiny", action="store_true", help="inputs so small that the figures mean nothing")
    add("--json", nargs="?", const=STDOUT, metavar="FILE", help="JSON in FILE, or instead of the tables")
    return parser


if __name__ == "__main__":
    main()
