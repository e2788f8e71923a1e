"""Every state that a fused folder can be found in, its outcome, and the exit code that CI and servers see.

The folder is a real merge of a tiny Wan2.2 pair. What ``check`` cannot see without reading the weights,
or without the inputs, is here as well, with what does see it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fuselora.check.command import main
from fuselora.check.folder import check
from fuselora.cli import app
from fuselora.errors import InputError
from fuselora.marker import FILE_NAME, JOURNAL_NAME
from fuselora.pipeline import merge
from tests.fused_pair import FUSED, LOW, Pair, edit_marker, edit_tensor, shard_of, write_high, write_pair

CONFIG = "transformer/config.json"
TOKENIZER = "tokenizer/tokenizer_config.json"
Damage = Callable[[Pair, Path], object]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def other(pair: Pair) -> Path:
    """Another fusion of the same base, with the same files."""
    return merge(pair.base, [f"low={pair.low}:0.25", f"high={pair.high}"], pair.folder / "other").out


@pytest.fixture(scope="module")
def stacked(pair: Pair) -> Path:
    """The folder itself as the base of a second fusion."""
    lora = write_high(pair.folder / "second.safetensors", seed=9)
    return merge(pair.out, [f"low={lora}"], pair.folder / "stacked", stack=True).out


@pytest.fixture
def out(pair: Pair, tmp_path: Path) -> Path:
    return pair.copy(tmp_path / "out", digests=True)


def codes(out: Path, **options: Any) -> set[str]:
    return {finding.code for finding in check(out, **options).findings}


def exit_codes(*arguments: object) -> set[int]:
    """Of ``fuselora check`` and ``python -m fuselora.marker``."""
    words = [str(argument) for argument in arguments]
    return {CliRunner().invoke(app, ["check", *words]).exit_code, main(words)}


def assert_found(out: Path, *expected: str) -> None:
    """Without reading the weights; and both commands exit with 1."""
    assert codes(out) == set(expected)
    assert exit_codes(out) == {1}


def edit(out: Path, change: Callable[[Any], object]) -> None:
    """By hand: the seal stays as it was."""
    document = json.loads((out / FILE_NAME).read_bytes())
    change(document)
    (out / FILE_NAME).write_text(json.dumps(document, indent=2))


# Whole ---------------------------------------------------------------------------------------------


def test_whole(pair: Pair, out: Path, other: Path, stacked: Path) -> None:
    for folder in (out, other, stacked, pair.plain):
        assert codes(folder) == set()
        assert exit_codes(folder) == {0}
    assert exit_codes(out, "--digest") == {0}


def test_whole_as_a_hub_download_leaves_it(out: Path) -> None:
    for name in (
        ".gitattributes",
        "README.md",
        ".cache/huggingface/x.safetensors.metadata",
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("")
    assert exit_codes(out) == {0}


def test_another_lora_is_not_in_it(pair: Pair, out: Path, stacked: Path) -> None:
    assert stacked.is_dir()
    assert exit_codes(out, "--lora", pair.folder / "second.safetensors") == {0}


@pytest.mark.parametrize("name", ["one", "renamed", "both in a list", "beside another"])
def test_a_lora_that_is_in_it(pair: Pair, out: Path, stacked: Path, tmp_path: Path, name: str) -> None:
    second = pair.folder / "second.safetensors"
    asked: dict[str, list[object]] = {
        "one": ["--lora", pair.low],
        "renamed": ["--lora", shutil.copy(pair.low, tmp_path / "x.safetensors")],
        "both in a list": ["--lora", f"{pair.high},{pair.low}"],
        "beside another": ["--lora", second, "--lora", pair.high],
    }
    assert exit_codes(out, *asked[name]) == {1}
    assert exit_codes(stacked, *asked[name], "--lora", second) == {1}


# The marker ----------------------------------------------------------------------------------------


def test_never_fused(pair: Pair) -> None:
    assert_found(pair.base, "no-marker")


def test_marker_removed(out: Path) -> None:
    (out / FILE_NAME).unlink()
    assert_found(out, "removed")


def test_marker_cut_short(out: Path) -> None:
    (out / FILE_NAME).write_bytes((out / FILE_NAME).read_bytes()[:-100])
    assert_found(out, "marker")


EDITS: dict[str, Callable[[Any], object]] = {
    "a file's digest": lambda m: m["side_files"][0].update(sha256="0" * 64),
    "a shard's digest": lambda m: m["components"]["transformer"]["files"][0].update(sha256="0" * 64),
    "a shard's header": lambda m: m["components"]["transformer"]["files"][0].update(header_sha256="0" * 64),
    "a size": lambda m: m["side_files"][0].update(bytes=1),
    "a file's entry removed": lambda m: m["side_files"].pop(),
    "a LoRA's entry removed": lambda m: m["loras"].pop(),
    "a LoRA's content": lambda m: m["loras"][0].update(content_sha256="0" * 64),
    "a LoRA's component": lambda m: m["loras"][0].update(component="transformer_2"),
    "a strength": lambda m: m["loras"][1].update(strength=1.0),
    "a scale": lambda m: m["loras"][1]["scales"][0].update(scale=1.0),
    "the order of LoRAs": lambda m: m["loras"].reverse(),
    "the fingerprint": lambda m: m.update(fingerprint=f"sha256:{'0' * 64}"),
    "the artifact": lambda m: m.update(artifact=f"sha256:{'0' * 64}"),
    "the base": lambda m: m["base"].update(source="another"),
    "a count": lambda m: m["components"]["transformer"].update(copied=1),
    "a warning removed": lambda m: m.update(warnings=[{"code": "x", "message": "y"}]),
    "a new field": lambda m: m.update(reviewed=True),
    "a version of our own major": lambda m: m.update(schema="fuselora.fused/1.9"),
}


@pytest.mark.parametrize("name", EDITS)
def test_marker_edited(out: Path, name: str) -> None:
    edit(out, EDITS[name])
    assert_found(out, "edited")


def test_marker_without_its_seal(out: Path) -> None:
    edit(out, lambda marker: marker.pop("seal"))
    assert_found(out, "marker")


def test_policy_changed_by_whoever_serves_it_and_another_time(out: Path) -> None:
    edit(out, lambda marker: marker["policy"].update(distill_lora="allow"))
    edit(out, lambda marker: marker.update(created="2026-12-01T12:00:00Z"))
    assert exit_codes(out) == {0}


@pytest.mark.parametrize("path", ["../x.json", "/etc/passwd", "tokenizer/../../x"])
def test_marker_with_a_path_that_leaves_the_folder(out: Path, path: str) -> None:
    edit_marker(out, lambda marker: marker["side_files"][0].update(path=path))
    assert_found(out, "path")


def test_marker_of_a_newer_minor_version(out: Path) -> None:
    edit_marker(out, lambda marker: marker.update(schema="fuselora.fused/1.9", new=[1]))
    assert exit_codes(out) == {0}
    assert "newer than this fuselora" in "\n".join(check(out).lines(out))


def test_marker_of_a_newer_major_version(out: Path) -> None:
    edit(out, lambda marker: marker.update(schema="fuselora.fused/2.0"))
    assert_found(out, "version")


# Edits under a seal that fits: what is left to see them. No check sees all of them, verify does.


def test_forged_digest(out: Path) -> None:
    edit_marker(out, EDITS["a shard's digest"])
    assert_found(out, "artifact", "content")


def test_forged_fingerprint(out: Path) -> None:
    edit_marker(out, EDITS["the fingerprint"])
    assert_found(out, "fingerprint")


@pytest.mark.parametrize("name", ["a LoRA's entry removed", "a strength", "a scale", "a LoRA's content"])
def test_forged_lora(pair: Pair, out: Path, name: str) -> None:
    edit_marker(out, EDITS[name])
    assert exit_codes(out, "--digest") == {0}
    assert not pair.verify(out).ok


# Unfinished and partly copied ----------------------------------------------------------------------


def test_journal_without_a_marker(out: Path) -> None:
    (out / FILE_NAME).rename(out / JOURNAL_NAME)
    assert_found(out, "unfinished")


def test_partly_copied(out: Path) -> None:
    """Stopped on the way, as rsync leaves it."""
    shards = sorted((out / "transformer_2").glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:5000])
    shards[1].unlink()
    shutil.rmtree(out / "vae")
    assert_found(out, "size", "missing")


def test_missing_shard(out: Path) -> None:
    shard_of(out, "transformer", FUSED).unlink()
    assert_found(out, "missing")


def test_missing_expert(out: Path) -> None:
    shutil.rmtree(out / "transformer_2")
    assert_found(out, "missing")


# The wrong files -----------------------------------------------------------------------------------


def test_shards_swapped(out: Path) -> None:
    one, two = sorted((out / "transformer").glob("*.safetensors"))[:2]
    swap(one, two)
    assert codes(out) & {"header", "size"}
    assert exit_codes(out) == {1}


def test_experts_swapped(out: Path) -> None:
    swap(out / "transformer", out / "transformer_2")
    assert "component" in codes(out)
    assert exit_codes(out) == {1}


def test_experts_swapped_whose_shards_are_alike(pair: Pair, tmp_path: Path) -> None:
    """Both fused whole, so that sizes, names, shapes and fingerprint are the same."""
    out = merge(pair.base, [f"all={pair.high}"], tmp_path / "alike").out
    swap(out / "transformer", out / "transformer_2")
    assert_found(out, "component")


def swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def test_shard_of_the_base(pair: Pair, out: Path) -> None:
    shard = shard_of(out, "transformer", FUSED)
    shutil.copy(pair.base / shard.relative_to(out), shard)
    assert codes(out) >= {"size"}
    assert exit_codes(out) == {1}


def test_shard_of_another_fusion(out: Path, other: Path) -> None:
    shard = shard_of(out, "transformer_2", FUSED)
    shutil.copy(other / shard.relative_to(out), shard)
    assert_found(out, "header", "fingerprint")


def test_marker_over_another_fusion(out: Path, other: Path) -> None:
    shutil.copy(other / FILE_NAME, out / FILE_NAME)
    assert_found(out, "header", "fingerprint")


def test_marker_over_a_folder_that_was_fused_again(out: Path, stacked: Path) -> None:
    for path in stacked.rglob("*.safetensors"):
        shutil.copy(path, out / path.relative_to(stacked))
    assert {"header", "fingerprint"} <= codes(out)
    assert exit_codes(out) == {1}


def test_fused_again_in_place_with_the_header_kept(out: Path) -> None:
    """As an engine would save it: only the bytes tell."""
    edit_tensor(shard_of(out, "transformer", FUSED), FUSED, lambda held: 2 * held)
    assert_found(out, "content")
    assert codes(out, digest=True) == {"content"}
    assert exit_codes(out, "--digest") == {1}


def test_copied_expert_replaced_by_the_other_one(pair: Pair, tmp_path: Path) -> None:
    out = merge(pair.base, [f"high={pair.high}"], tmp_path / "high").out
    for shard in (pair.base / "transformer").glob("*.safetensors"):
        shutil.copy(shard, out / "transformer_2" / shard.name)
    assert_found(out, "content")


@pytest.mark.parametrize("path", [CONFIG, TOKENIZER, "model_index.json", "scheduler/scheduler_config.json"])
@pytest.mark.parametrize("same_size", [True, False])
def test_config_or_tokenizer_edited(out: Path, path: str, same_size: bool) -> None:
    content = (out / path).read_bytes()
    (out / path).write_bytes(content[:-1] + b" " if same_size else content + b"\n")
    assert_found(out, "content" if same_size else "size")


def test_index_edited(out: Path) -> None:
    (index,) = (out / "transformer").glob("*.index.json")
    index.write_text(index.read_text().replace("00001-of", "00002-of"))
    assert_found(out, "content")


def test_file_replaced_by_a_link_that_leaves_the_folder(pair: Pair, out: Path) -> None:
    (out / CONFIG).unlink()
    (out / CONFIG).symlink_to(pair.base / CONFIG)
    assert_found(out, "outside")


@pytest.mark.parametrize("place", ["", "transformer/", "vae/", "new/"])
def test_lora_left_in_the_folder(pair: Pair, out: Path, place: str) -> None:
    (out / place).mkdir(exist_ok=True)
    shutil.copy(pair.low, out / f"{place}{LOW}")
    assert_found(out, "stray")


def test_tokenizer_file_added(out: Path) -> None:
    (out / "tokenizer" / "added_tokens.json").write_text("{}")
    assert_found(out, "unlisted")


# Without digests -----------------------------------------------------------------------------------


def test_digests_asked_of_a_folder_without(pair: Pair) -> None:
    assert codes(pair.plain, digest=True) == {"no-digests"}
    assert exit_codes(pair.plain, "--digest") == {1}


# One shard alone -----------------------------------------------------------------------------------


def test_a_shard_moved_alone(out: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(shard_of(out, "transformer_2", FUSED), tmp_path / "x.safetensors"))
    assert exit_codes(alone) == {1}
    run = CliRunner().invoke(app, ["check", str(alone)])
    marker = json.loads((out / FILE_NAME).read_bytes())
    assert f"a shard of the fused checkpoint {marker['fingerprint']}" in run.stderr
    shown = CliRunner().invoke(app, ["inspect", str(alone), "--json"])
    assert shown.exit_code == 0
    said = json.loads(shown.stdout)["files"][0]["fused"]
    assert (said["fingerprints"], said["components"]) == ([marker["fingerprint"]], ["transformer_2"])


# Inputs that make no sense -------------------------------------------------------------------------


def test_no_such_folder(tmp_path: Path) -> None:
    assert exit_codes(tmp_path / "absent") == {1}


def test_a_name_too_long_for_the_file_system(tmp_path: Path) -> None:
    assert exit_codes(tmp_path / ("a" * 300), "--json") == {1}
    with pytest.raises(InputError, match="a: cannot be read: File name too long"):
        check(tmp_path / ("a" * 300))


@pytest.mark.parametrize("refused", [Path.is_dir, Path.is_symlink])
def test_a_folder_that_may_not_be_looked_into(
    out: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[[Path], bool]
) -> None:
    """Its parent, or it itself: root may look into everything, so the answer is the system's."""

    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, refused.__name__, denied)
    with pytest.raises(InputError, match=r"out(/fused.json)?: cannot be read: Permission denied"):
        check(out)
    assert exit_codes(out) == {1}


def test_what_may_not_be_read_is_no_usage(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(out) and access(path, mode))
    assert exit_codes(out) == {0}


def test_usage(pair: Pair) -> None:
    assert exit_codes(pair.out, "--lora", f"transformer={pair.high}") == {2}
