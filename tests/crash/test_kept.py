"""A shard of an earlier run is kept only if it is what this run would write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselora import synth
from fuselora.marker import JOURNAL_NAME
from fuselora.output import claims
from tests.crash.nursery import Run
from tests.crash.trial import NEW, SIZE, Scene, contents

Change = Callable[[Path], object]


def cut_short(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def lengthened(shard: Path) -> None:
    with shard.open("ab") as stream:
        stream.write(b"\0")


def altered(shard: Path) -> None:
    """One bit, with the size and the times that it had."""
    before, content = shard.stat(), bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def linked(shard: Path) -> None:
    """The same bytes, elsewhere."""
    shard.rename(shard.parents[2] / "elsewhere")
    shard.symlink_to(shard.parents[2] / "elsewhere")


def removed(shard: Path) -> None:
    shard.unlink()


def partial_at(scene: Scene, out: Path) -> list[str]:
    """A killed run's folder beside ``out``, and the shards that it finished."""
    shutil.copytree(scene.partial, out.with_name("out.partial"))
    return [str(line["path"]) for line in claims.journal_lines(scene.partial)[1:]]


def merged(scene: Scene, out: Path, *options: str, strength: float = 1) -> Run:
    run = scene.nursery.run(scene.argv(out, *options, strength=strength))
    assert run.status == 0, run.errors
    return run


def test_the_rest_alone_is_written(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = partial_at(scene, out)
    before = {path: (out.with_name("out.partial") / path).stat().st_ino for path in finished}
    run = merged(scene, out)
    assert run.kept == finished
    assert len(finished) >= 2
    assert not {str(out.with_name("out.partial") / path) for path in finished} & run.opened()
    assert {path: (out / path).stat().st_ino for path in finished} == before
    assert contents(out) == scene.undisturbed(NEW)[1]


@pytest.mark.parametrize("change", [cut_short, lengthened, altered, linked, removed])
def test_a_shard_that_is_not_as_it_was_is_written_anew(scene: Scene, tmp_path: Path, change: Change) -> None:
    out = tmp_path / "out"
    first, *others = partial_at(scene, out)
    change(out.with_name("out.partial") / first)
    assert merged(scene, out).kept == others
    assert contents(out) == scene.undisturbed(NEW)[1]


@pytest.mark.parametrize(
    ("options", "strength"),
    [
        ((), 0.75),
        (("--dtype", "float32"), 1.0),
        (("--kernel", "reference"), 1.0),
        (("--blocks", "blocks.0=0.5"), 1.0),
    ],
)
def test_shards_of_other_options_are_not_kept(
    scene: Scene, tmp_path: Path, options: tuple[str, ...], strength: float
) -> None:
    merged(scene, tmp_path / "whole" / "out", *options, strength=strength)
    out = tmp_path / "out"
    assert partial_at(scene, out)
    assert merged(scene, out, *options, strength=strength).kept == []
    assert contents(out) == contents(tmp_path / "whole" / "out")


def test_shards_of_other_loras_are_not_kept(scene: Scene, tmp_path: Path) -> None:
    other = synth.write_lora(tmp_path / "other.safetensors", SIZE, style="lightning", rank=4, seed=9)
    argv = [text.replace(str(scene.high), str(other)) for text in scene.argv(tmp_path / "out")]
    partial_at(scene, tmp_path / "out")
    run = scene.nursery.run(argv)
    assert (run.status, run.kept) == (0, []), run.errors


def test_shards_of_another_base_are_not_kept(scene: Scene, tmp_path: Path) -> None:
    """The same bytes: another file, which may have been edited with its times put back."""
    base = shutil.copytree(scene.base, tmp_path / "base")
    argv = [str(base) if text == str(scene.base) else text for text in scene.argv(tmp_path / "out")]
    partial_at(scene, tmp_path / "out")
    run = scene.nursery.run(argv)
    assert (run.status, run.kept) == (0, []), run.errors


@pytest.mark.parametrize("name", ["tool", "schema"])
def test_shards_of_another_version_are_not_kept(scene: Scene, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    partial_at(scene, out)
    journal = out.with_name("out.partial") / JOURNAL_NAME
    header, *rest = journal.read_bytes().split(b"\n")
    value = str(claims.journal_lines(scene.partial)[0][name]).encode()
    journal.write_bytes(b"\n".join([header.replace(b'"%b"' % value, b'"%b9"' % value), *rest]))
    assert merged(scene, out).kept == []
