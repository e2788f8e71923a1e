"""What the bench starts: copies, merges and peers, each with the output that it leaves."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmark.inputs import Case, Inputs, Pair

ROOT = Path(__file__).resolve().parents[2]
HASH_BYTES = 1 << 20
IMPORTS_BYTES = 400 << 20  # what torch and diffusers take by themselves
COPY, DIGESTED_COPY, MERGE = "cp + fsync", "cp + fsync + sha256", "fuselora merge"


@dataclass(frozen=True, slots=True)
class Command:
    """A process to time. ``then`` is done in this process afterwards and counted with it."""

    name: str
    argv: tuple[str, ...]
    out: Path | None = None
    then: Callable[[], None] | None = None
    peer: Peer | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """Another way to the same result, in a module of ``benchmark.peers``.

    ``packages`` it needs; ``memory`` at its peak, measured, in multiples of the base's bytes.
    """

    name: str
    title: str
    module: str
    packages: tuple[str, ...]
    memory: float
    options: tuple[str, ...] = ()

    def memory_bytes(self, case: Case) -> int:
        """About what it needs at its peak."""
        return IMPORTS_BYTES + int(self.memory * case.base_bytes)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("plain", "plain script", "plain", ("torch", "safetensors"), 1.5),
        Peer("float32", "plain script, float32", "plain", ("torch", "safetensors"), 1.5, ("--float32",)),
        Peer("diffusers", "diffusers fuse_lora", "with_diffusers", ("diffusers", "peft"), 1.5),
        Peer("peft", "PEFT merge_and_unload", "with_peft", ("diffusers", "peft"), 1.5),
    )
}


def environment() -> dict[str, str]:
    """This checkout is what runs, and no peer asks the network."""
    path = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}


def copies(inputs: Inputs, out: Path) -> tuple[Command, ...]:
    """The base alone, copied and on disk; and a digest of the copy on top."""
    never = ("--reflink=never",) if sys.platform == "linux" else ()
    argv = ("cp", *never, "-r", str(inputs.base), str(out))

    def digested() -> None:
        fsync_files(out)
        for path in sorted(out.iterdir()):
            sha256(path)

    return Command(COPY, argv, out, lambda: fsync_files(out)), Command(DIGESTED_COPY, argv, out, digested)


def merges(case: Case, inputs: Inputs, out: Path, jobs: Sequence[int], more: Sequence[str]) -> list[Command]:
    """The whole command, with digests and without, on all cores and with each of ``jobs`` threads."""
    argv = (*fuselora("merge"), *merge_options(case, inputs, out), *more)
    found = []
    for number in (None, *jobs):
        threads = () if number is None else ("--jobs", str(number))
        name = " ".join((MERGE, *threads))
        found.append(Command(name, (*argv, *threads), out))
        found.append(Command(f"{name} --no-digest", (*argv, *threads, "--no-digest"), out))
    return found


def profiled(merge: Command, path: Path) -> Command:
    """The same merge, which writes where its time goes into ``path``."""
    python, module, _, *arguments = merge.argv
    return replace(merge, argv=(python, module, "benchmark.profiled", str(path), *arguments))


def merge_options(case: Case, inputs: Inputs, out: Path) -> tuple[str, ...]:
    """Those that every merge of a case has."""
    loras = [part for lora in _with_strengths(case, inputs) for part in ("--lora", lora)]
    return ("--base", str(inputs.base), *loras, "--out", str(out), "--dtype", "bfloat16", "--quiet")


def peers(case: Case, inputs: Inputs, out: Path, names: Sequence[str]) -> list[Command]:
    """Those of ``names`` that can do this case."""
    return [peer_command(PEERS[name], case, inputs, out) for name in names if name in case.peers]


def peer_command(peer: Peer, case: Case, inputs: Inputs, out: Path) -> Command:
    """A peer at the same work."""
    argv = (sys.executable, "-m", f"benchmark.peers.{peer.module}", str(inputs.base), str(out))
    loras = [part for lora in _with_strengths(case, inputs) for part in ("--lora", lora)]
    dtype = {"bf16": "bfloat16", "f32": "float32"}[case.base]
    return Command(peer.title, (*argv, *loras, "--base-dtype", dtype, *peer.options), out, peer=peer)


def startup(demo: Pair, full: Pair) -> tuple[Command, ...]:
    """What a user waits for before any work: the tiny pair of the demo, help, and a plan at true size."""
    merge = (*_both_experts(demo), "--dtype", "bfloat16", "--out", str(demo.out))
    return (
        Command("fuselora --help", fuselora("--help")),
        Command("fuselora plan, Wan2.2 pair of true size", (*fuselora("plan"), *_both_experts(full))),
        Command("fuselora merge, the demo's pair", (*fuselora("merge"), *merge), demo.out),
    )


def fuselora(command: str) -> tuple[str, ...]:
    """The command of this checkout."""
    return (sys.executable, "-m", "fuselora", command)


def fsync_files(folder: Path) -> None:
    """Every file of ``folder``, and the folder itself."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sha256(path: Path) -> str:
    """Hex digest; in one small buffer, which stays in the cache and is not allocated again."""
    hasher, room = hashlib.sha256(), memoryview(bytearray(HASH_BYTES))
    with path.open("rb", buffering=0) as stream:
        while n_bytes := stream.readinto(room):
            hasher.update(room[:n_bytes])
    return hasher.hexdigest()


def _both_experts(pair: Pair) -> tuple[str, ...]:
    return ("--quiet", "--base", str(pair.base), "--high", str(pair.high), "--low", str(pair.low))


def _with_strengths(case: Case, inputs: Inputs) -> list[str]:
    return [f"{path}:{strength}" for path, strength in zip(inputs.loras, case.strengths, strict=True)]
