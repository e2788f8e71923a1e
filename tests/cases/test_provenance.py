"""Public reports about what stays behind: LoRAs fused twice, changed bases, outputs nobody can explain."""
# ruff: noqa: N802 - cases keep their names

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fuselora import __version__
from fuselora.digest import sha256_file
from fuselora.marker import check, read_marker
from tests.cases.builders import (
    MODULE,
    PEFT,
    Fused,
    K,
    Q,
    assert_filled,
    base_of,
    command,
    full,
    fuse,
    refuse,
    save,
    sharded_base,
    std_base,
    std_pair,
    std_tensors,
    tree,
)

STACK = ["--stack"]
TO_K = K.removesuffix(".weight")


def std_lora(folder: Path, name: str = "x", value: float = 1.0) -> Path:
    return save(folder / f"{name}.safetensors", std_pair(4, value=value))


# B19


@pytest.mark.parametrize("options", [[], STACK])
@pytest.mark.parametrize("experts", [1, 2])
def test_B19_a_lora_listed_twice(experts: int, options: list[str], tmp_path: Path) -> None:
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    if experts == 2:
        base_of(base, std_tensors(), component="transformer_2")
    refuse(base, f"{lora},{lora}", says=("x.safetensors", "twice"), options=options)


@pytest.mark.parametrize("options", [[], STACK])
@pytest.mark.parametrize(
    "second", ["{x}", "{x}:0.5", "{x}:-1", "transformer={x}", "{folder}/../{name}/x.safetensors"]
)
def test_B19_a_lora_given_twice(second: str, options: list[str], tmp_path: Path) -> None:
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    again = second.format(x=lora, folder=tmp_path, name=tmp_path.name)
    refuse(base, lora, again, says=("x.safetensors", "same LoRA", "twice"), options=options)


COPIES = ["bytes", "link", "hard link", "saved again", "saved with metadata", "other order"]


def copied(lora: Path, how: str) -> Path:
    """The same content under another name."""
    copy = lora.with_name("y.safetensors")
    if how == "bytes":
        shutil.copyfile(lora, copy)
    elif how == "link":
        copy.symlink_to(lora)
    elif how == "hard link":
        copy.hardlink_to(lora)
    elif how == "saved with metadata":
        save(copy, load_file(lora), {"note": "mine now", "ss_training_comment": "stolen"})
    elif how == "saved again":
        save(copy, load_file(lora))
    else:
        reordered(lora, copy)
    return copy


def reordered(lora: Path, copy: Path) -> None:
    """The same tensors in the opposite order, by hand: the library sorts them."""
    entries, at, data = {}, 0, b""
    for name, tensor in sorted(load_file(lora).items(), reverse=True):
        content = tensor.numpy().tobytes()
        offsets = [at, at + len(content)]
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        at, data = offsets[1], data + content
    text = json.dumps(entries).encode()
    copy.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("options", [[], STACK])
@pytest.mark.parametrize("how", COPIES)
def test_B19_a_copy_under_another_name(how: str, options: list[str], tmp_path: Path) -> None:
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    copy = copied(lora, how)
    says = ("x.safetensors", "y.safetensors", "same LoRA", "twice")
    refuse(base, lora, copy, says=says, options=options)


def test_B19_a_copy_for_the_other_expert(tmp_path: Path) -> None:
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    base_of(base, std_tensors(), component="transformer_2")
    copy = copied(lora, "saved again")
    refuse(base, f"{lora},{copy}", says=("x.safetensors", "y.safetensors", "same LoRA", "all="))


def test_B19_one_for_both_and_again_for_one(tmp_path: Path) -> None:
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    base_of(base, std_tensors(), component="transformer_2")
    refuse(base, f"all={lora}", f"low={lora}", says=("x.safetensors", "same LoRA", "twice"))


def fused_once(tmp_path: Path, container: str = "pipeline") -> tuple[Path, Path]:
    """A fused base that holds x, and x."""
    lora = std_lora(tmp_path)
    if container == "file":
        base = save(tmp_path / "base.safetensors", std_tensors())
        return fuse(base, lora, out=tmp_path / "fused").out / "base.safetensors", lora
    out = fuse(std_base(tmp_path / "base"), lora, out=tmp_path / "fused").out
    return (out / "transformer" if container == "component" else out), lora


CONTAINERS = ["pipeline", "component", "file"]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("strength", ["", ":0.5", ":-1"])
def test_B19_a_fused_base_and_the_same_lora(strength: str, container: str, tmp_path: Path) -> None:
    base, lora = fused_once(tmp_path, container)
    refuse(base, f"{lora}{strength}", says=(base.name, "already fused"), out=tmp_path / "out")
    said = refuse(base, f"{lora}{strength}", says=("fused",), out=tmp_path / "out", options=STACK)
    if container != "component":
        assert "x.safetensors: is already fused into transformer" in said


@pytest.mark.parametrize("how", COPIES)
def test_B19_a_fused_base_and_a_copy(how: str, tmp_path: Path) -> None:
    base, lora = fused_once(tmp_path)
    copy = copied(lora, how)
    refuse(base, copy, says=("already fused",))
    refuse(base, copy, says=("y.safetensors", "already fused", "x.safetensors"), options=STACK)


@pytest.mark.parametrize("container", CONTAINERS)
def test_B19_another_lora_on_a_fused_base_needs_stack(container: str, tmp_path: Path) -> None:
    base, _ = fused_once(tmp_path, container)
    other = std_lora(tmp_path, "y", 2.0)
    refuse(base, other, says=("already fused", "--stack"), out=tmp_path / "out")
    if container == "component":  # the marker is a folder up
        whole = f"give {base.parent} with --stack"
        refuse(base, other, says=(f"a part of {base.parent}", whole), out=tmp_path / "out", options=STACK)
        base = base.parent
    stacked = fuse(base, other, out=tmp_path / "out", options=STACK)
    assert_filled(stacked.tensors("" if container == "file" else "transformer")[Q], 4.0)
    assert [lora["name"] for lora in stacked.document["loras"]] == ["x.safetensors", "y.safetensors"]
    before = json.loads((tmp_path / "fused" / "fused.json").read_text())
    assert stacked.document["stacked_on"] == before["fingerprint"]
    assert stacked.document["loras"][0] == before["loras"][0]


def test_B19_nothing_that_was_stacked_is_stacked_again(tmp_path: Path) -> None:
    base, first = fused_once(tmp_path)
    second = std_lora(tmp_path, "y", 2.0)
    stacked = fuse(base, second, out=tmp_path / "stacked", options=STACK).out
    for lora in (first, second):
        refuse(stacked, lora, says=(lora.name, "already fused into transformer"), options=STACK)
    third = std_lora(tmp_path, "z", 4.0)
    assert_filled(fuse(stacked, third, out=tmp_path / "out", options=STACK).tensors()[Q], 8.0)


def test_B19_the_other_expert_may_still_get_it(tmp_path: Path) -> None:
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    base_of(base, std_tensors(), component="transformer_2")
    once = fuse(base, f"high={lora}", out=tmp_path / "once").out
    refuse(once, f"high={lora}", says=("x.safetensors", "already fused into transformer"), options=STACK)
    both = fuse(once, f"low={lora}", options=STACK)
    assert_filled(both.tensors("transformer")[Q], 2.0)
    assert_filled(both.tensors("transformer_2")[Q], 2.0)


def test_B19_a_fused_base_without_its_marker(tmp_path: Path) -> None:
    base, lora = fused_once(tmp_path)
    (base / "fused.json").unlink()
    for options in ([], STACK):
        for given in (lora, std_lora(tmp_path, "y", 2.0)):
            refuse(base, given, says=("fused",), options=options)


def test_B19_a_fused_shard_moved_alone(tmp_path: Path) -> None:
    base, lora = fused_once(tmp_path, "file")
    alone = tmp_path / "elsewhere" / "model.safetensors"
    alone.parent.mkdir()
    shutil.copyfile(base, alone)
    refuse(alone, lora, says=("model.safetensors", "already fused"), out=tmp_path / "out")


def test_B19_the_check_finds_a_lora_that_is_in_it(tmp_path: Path) -> None:
    base, lora = fused_once(tmp_path)
    copy, other = copied(lora, "saved with metadata"), std_lora(tmp_path, "z", 3.0)
    assert not check(base, loras=[copy]).ok
    assert check(base, loras=[other]).ok
    assert command("check", base, "--lora", copy).exit_code == 1
    assert command("check", base, "--lora", other).exit_code == 0


# B57


def large_base(root: Path) -> Path:
    """Two experts of several shards, so that there is a middle to be killed in."""
    tensors = std_tensors()
    shards = [
        {Q: tensors[Q]},
        {K: tensors[K], "blocks.0.scale_shift_table": full(1, 6, 4)},
        {"patch_embedding.bias": full(4)},
    ]
    sharded_base(root, *shards)
    base_of(root, tensors, component="transformer_2")
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    return root


def both_experts(folder: Path) -> Path:
    lora = {**std_pair(4, alpha=2.0), **std_pair(2, TO_K, style=PEFT)}
    return save(folder / "x.safetensors", lora)


def test_B57_a_good_run_leaves_the_base_alone(tmp_path: Path) -> None:
    base, lora = large_base(tmp_path / "base"), both_experts(tmp_path)
    before, files = tree(tmp_path), stats(base)
    fused = fuse(base, f"all={lora}")
    assert tree(base) == {name[5:]: digest for name, digest in before.items() if name.startswith("base/")}
    assert stats(base) == files
    assert_filled(fused.tensors("transformer_2")[Q], 1.5)
    shutil.rmtree(fused.out)
    assert tree(tmp_path) == before


def stats(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (s.st_ino, s.st_mtime_ns, s.st_mode) for path, s in found.items()}


@pytest.mark.parametrize("assets", ["copy", "hardlink", "symlink"])
def test_B57_what_is_done_to_the_output_does_not_reach_the_weights(assets: str, tmp_path: Path) -> None:
    base, lora = large_base(tmp_path / "base"), both_experts(tmp_path)
    before = tree(base)
    fused = fuse(base, f"all={lora}", options=["--assets", assets])
    for path in fused.out.rglob("*.safetensors"):
        path.write_bytes(b"overwritten")
    shutil.rmtree(fused.out)
    assert tree(base) == before


def test_B57_a_run_that_fails_on_the_way_leaves_everything_alone(tmp_path: Path) -> None:
    """The last tensor overflows, when the shards before it are written."""
    base = large_base(tmp_path / "base")
    weight = full(4, 4, value=65504.0, dtype=torch.float16)
    base_of(base, {Q: weight, K: full(4, 4)}, component="transformer_2")
    lora = save(tmp_path / "x.safetensors", std_pair(4, value=64.0))
    says = ("transformer_2", Q, "not finite")
    refuse(base, f"all={lora}", says=says)
    refuse(base, f"all={lora}", says=says, options=["--no-digest"])
    refuse(base, f"all={lora}", says=says, out=tmp_path / "deep" / "er" / "out")


KILLED = """
import os, signal, sys
from contextlib import contextmanager
import fuselora.build  # torch is loaded once, for all children
from fuselora.pipeline import merge

class Deadly:
    def __init__(self, left):
        self.left = left

    @contextmanager
    def phase(self, name, n_bytes):
        yield self.advance if name == "fuse" else lambda done: None

    def advance(self, done):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

def killed(base, lora, out, left, overwrite):
    child = os.fork()
    if child == 0:
        merge(base, [lora], out, progress=Deadly(left), overwrite=overwrite)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

base, lora, out, overwrite, stride = sys.argv[1:]
left = 0
while (code := killed(base, lora, f"{out}{left}", left, bool(overwrite))) == -signal.SIGKILL:
    left += int(stride)
sys.exit(0 if code == 0 else f"ended with {code}")
"""


def kill_everywhere(base: Path, lora: str, out: str, *, overwrite: bool = False, stride: int = 1) -> None:
    """Runs that are killed at one step after the other, each with an OUT of its own, up to one that ends.

    Every ``stride``-th step is tried; ``out`` and the number of the step make the name of OUT.
    """
    arguments = [str(base), lora, out, "overwrite" if overwrite else "", str(stride)]
    subprocess.run([sys.executable, "-c", KILLED, *arguments], check=True, cwd=base.parent)


@pytest.fixture
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@dataclass(frozen=True)
class Killed:
    """A base, a LoRA, and what was left of runs that were killed at every step, in the order of the steps."""

    base: Path
    lora: str
    stages: tuple[Path, ...]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    base, lora = large_base(folder / "base"), f"all={both_experts(folder)}"
    before, files = tree(base), stats(base)
    kill_everywhere(base, lora, str(folder / "out"))
    assert tree(base) == before and stats(base) == files
    stages = sorted(folder.glob("out*.partial"), key=lambda path: int(path.stem.removeprefix("out")))
    assert len(stages) >= 8
    assert not any(stage.with_suffix("").exists() for stage in stages)
    return Killed(base, lora, tuple(stages))


@pytest.mark.usefixtures("_fixed_time")
def test_B57_a_killed_run_is_finished_by_the_next(killed: Killed, tmp_path: Path) -> None:
    before, files = tree(killed.base), stats(killed.base)
    expected = tree(fuse(killed.base, killed.lora, out=tmp_path / "whole").out)
    kept = 0
    for stage in killed.stages[::2]:
        fused = fuse(killed.base, killed.lora, out=stage.with_suffix(""))
        assert tree(fused.out) == expected
        kept += "Kept from an earlier run" in fused.run.stdout
    assert kept >= 2
    assert tree(killed.base) == before and stats(killed.base) == files


def test_B57_a_killed_run_is_no_output(killed: Killed, tmp_path: Path) -> None:
    """Neither a check nor a merge takes what was left for a checkpoint, and another LoRA starts afresh."""
    other = std_lora(tmp_path, "y", 3.0)
    for stage in killed.stages[1::2]:
        assert command("check", stage).exit_code == 1
        refuse(stage, other, says=(stage.name,), out=tmp_path / "else")
        fused = fuse(killed.base, f"all={other}", out=stage.with_suffix(""))
        assert_filled(fused.tensors()[Q], 4.0)
        assert_filled(fused.tensors()[K], 2.0)


@pytest.mark.usefixtures("_fixed_time")
def test_B57_a_killed_replacement_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    base, lora = large_base(tmp_path / "base"), f"all={both_experts(tmp_path)}"
    old = fuse(base, f"high={std_lora(tmp_path, 'y', 3.0)}", out=tmp_path / "old").out
    new = tree(fuse(base, lora, out=tmp_path / "new").out)
    outs = [shutil.copytree(old, tmp_path / f"out{step}") for step in range(0, 30, 5)]
    kill_everywhere(base, lora, str(tmp_path / "out"), overwrite=True, stride=5)
    found = [tree(out) for out in outs]
    assert all(one in (tree(old), new) for one in found)
    assert found.count(new) == 1
    for out in outs[:2]:
        assert tree(fuse(base, lora, out=out, options=["--overwrite"]).out) == new


def test_B57_subtracting_is_no_undo(tmp_path: Path) -> None:
    base, lora = fused_once(tmp_path)
    for options in ([], STACK):
        said = refuse(base, f"{lora}:-1", says=("already fused",), options=options)
        assert "undo" not in said and "-1" not in said
    for name in ("merge", "plan", "verify"):
        run = command(name, "--help")
        assert run.exit_code == 0
        assert "unfuse" not in run.stdout.lower() and "undo" not in run.stdout.lower()


def test_B57_what_is_in_the_way_stays_as_it_is(tmp_path: Path) -> None:
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for options in ([], ["--overwrite"], ["--restart"], ["--overwrite", "--restart"]):
        refuse(base, lora, says=("out", "notes.txt"), options=options)


@pytest.mark.parametrize("place", ["base", "base/out", "base/transformer", "."])
def test_B57_the_base_is_never_the_output(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    base, lora = std_base(folder / "base"), std_lora(folder)
    before = tree(tmp_path)
    for options in ([], ["--overwrite"], ["--overwrite", "--restart"]):
        refuse(base, lora, says=(str((folder / place).resolve()),), out=folder / place, options=options)
    assert tree(tmp_path) == before


# B58


def two_loras(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base, a LoRA that stores alphas, and one with its alpha in the metadata and a module too many."""
    to_k = TO_K
    first = save(tmp_path / "first.safetensors", {**std_pair(4, alpha=2.0), **std_pair(8, to_k, alpha=8.0)})
    second = save(
        tmp_path / "second.safetensors",
        {**std_pair(2, f"transformer.{MODULE}", style=PEFT), **std_pair(2, "text_encoder.x", style=PEFT)},
        {"alpha": "1"},
    )
    return std_base(tmp_path / "base"), first, second


def two_fused(tmp_path: Path, out: str = "out") -> Fused:
    base, first, second = two_loras(tmp_path)
    options = ["--allow-unmatched", "text_encoder.*"]
    return fuse(base, f"{first}:0.5", f"{second}:-1", out=tmp_path / out, options=options)


def test_B58_the_marker_says_what_was_merged(tmp_path: Path) -> None:
    fused = two_fused(tmp_path)
    assert_filled(fused.tensors()[Q], 1 + 0.5 * 0.5 - 0.5)
    assert_filled(fused.tensors()[K], 2.5)
    first, second = fused.document["loras"]
    assert (first["name"], first["strength"]) == ("first.safetensors", 0.5)
    assert (second["name"], second["strength"]) == ("second.safetensors", -1.0)
    for lora in (first, second):
        assert lora["sha256"] == sha256_file(tmp_path / lora["name"])
        assert lora["component"] == "transformer"
    assert (first["applied"]["pairs"], first["skipped"]) == (2, [])
    assert second["applied"]["pairs"] == 1
    assert [skip["module"] for skip in second["skipped"]] == ["text_encoder.x"]
    assert first["alpha"] == {"source": "tensor", "values": [2.0, 8.0]}
    assert second["alpha"] == {"source": "metadata", "values": [1.0]}
    assert (first["ranks"], second["ranks"]) == ([4, 8], [2])


def test_B58_the_marker_says_what_changed_and_by_what(tmp_path: Path) -> None:
    fused = two_fused(tmp_path)
    document, component = fused.document, fused.document["components"]["transformer"]
    assert (component["tensors"], component["fused"], component["copied"]) == (2, 2, 0)
    assert document["tool"] == {"name": "fuselora", "version": __version__, "torch": torch.__version__}
    assert document["lora_is_fused"] is True
    (file,) = component["files"]
    assert file["sha256"] == sha256_file(fused.out / file["path"])
    assert file["base_sha256"] == sha256_file(tmp_path / "base" / file["path"])
    assert {side["path"]: side["sha256"] for side in document["side_files"]} == {
        "transformer/config.json": sha256_file(tmp_path / "base" / "transformer" / "config.json")
    }
    marker = read_marker(fused.out)
    assert marker is not None and marker.raw == document
    assert str(tmp_path) not in (fused.out / "fused.json").read_text()


def test_B58_the_terminal_says_it_too(tmp_path: Path) -> None:
    said = two_fused(tmp_path).run.stdout
    assert "first.safetensors on transformer, strength 0.5: 2 modules" in said
    assert "second.safetensors on transformer, strength -1: 1 module (1 pair)" in said
    assert "scale 0.25 = strength * alpha 2 / rank 4 (alpha from the file's tensors)" in said
    assert "scale -0.5 = strength * alpha 1 / rank 2 (alpha from the file's metadata)" in said


def test_B58_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    first = two_fused(tmp_path / "a", "one").out
    second = two_fused(tmp_path / "b" / "deeper", "another").out
    assert without_time(first) == without_time(second)
    one, two = tree(first), tree(second)
    assert one.pop("fused.json") and two.pop("fused.json")
    assert one == two


def without_time(out: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((out / "fused.json").read_bytes())
    assert document.pop("created")
    return document


@pytest.mark.usefixtures("_fixed_time")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_B58_with_the_time_fixed_every_byte_is_the_same(jobs: str, tmp_path: Path) -> None:
    base, first, second = two_loras(tmp_path)
    loras = (str(first), f"{second}:-1")
    options = ["--allow-unmatched", "text_encoder.*", "--jobs", jobs]
    trees = [tree(fuse(base, *loras, out=tmp_path / name, options=options).out) for name in ("a", "b")]
    assert trees[0] == trees[1]
    assert json.loads((tmp_path / "a" / "fused.json").read_text())["created"] == "2023-11-14T22:13:20Z"


def test_B58_the_check_notices_one_changed_byte(tmp_path: Path) -> None:
    fused = two_fused(tmp_path)
    assert command("check", fused.out, "--digest").exit_code == 0
    (path,) = fused.out.rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    run = command("check", fused.out, "--digest")
    assert run.exit_code == 1
    assert path.name in run.stdout


def test_B58_the_marker_is_the_same_for_the_same_content(tmp_path: Path) -> None:
    """A LoRA that was renamed or saved again is the same LoRA, whatever its name says."""
    base, lora = std_base(tmp_path / "base"), std_lora(tmp_path)
    copy = copied(lora, "saved with metadata")
    one, two = (fuse(base, given, out=tmp_path / given.stem).document for given in (lora, copy))
    assert one["fingerprint"] == two["fingerprint"]
    assert one["loras"][0]["content_sha256"] == two["loras"][0]["content_sha256"]
    assert one["loras"][0]["sha256"] != two["loras"][0]["sha256"]
    assert os.fspath(lora) not in json.dumps(one)
