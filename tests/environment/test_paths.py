"""Names and places of files as users have them: each merged, or refused in words."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.environment.merges import COMMAND, Inputs, assert_merged, assert_refused, environment, run
from tests.environment.test_variables import ASCII
from tests.small import tree

NOT_UTF8 = os.fsdecode(b"caf\xe9")


def recorded(out: Path) -> tuple[str, str]:
    """What ``fused.json`` calls base and LoRA; it has to be JSON in UTF-8."""
    document = json.loads((out / "fused.json").read_bytes().decode("utf-8"))
    return document["base"]["source"], document["loras"][0]["name"]


@pytest.mark.parametrize("options", [[], ["--json"], ["--verbose"]], ids=str)
def test_names_that_are_not_utf8(inputs: Inputs, tmp_path: Path, options: list[str]) -> None:
    """On a terminal that knows ASCII alone."""
    lora = f"{NOT_UTF8}=a,b:0.5.safetensors"
    inputs.copied(tmp_path, NOT_UTF8, lora)
    out = f"{NOT_UTF8}-out"
    arguments = inputs.arguments(out, base=NOT_UTF8, lora=lora)
    done = run([*arguments, *options], env=environment(ASCII), cwd=tmp_path)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    said = done.stdout.decode("ascii")
    assert "caf" in said and (options != ["--json"] or json.loads(said))
    assert recorded(tmp_path / out) == ("caf\ufffd", "caf\ufffd=a,b:0.5.safetensors")
    for command in ("check", "verify", "inspect"):
        checked = run([command, out], env=environment(ASCII), cwd=tmp_path)
        assert checked.returncode == 0, checked.stderr


def test_a_name_that_is_not_utf8_and_leads_nowhere(inputs: Inputs, tmp_path: Path) -> None:
    for options in ([], ["--json"]):
        arguments = inputs.arguments("out", base=NOT_UTF8)
        done = run([*arguments, *options], env=environment(ASCII), cwd=tmp_path)
        assert_refused(done, "no such file or folder")
    json.loads(done.stdout.decode("ascii"))
    assert list(tmp_path.iterdir()) == []


def test_two_spellings_of_one_word_are_two_files(inputs: Inputs, tmp_path: Path) -> None:
    """NFC and NFD: what the file system tells apart, fuselora does too."""
    composed, apart = "\u00fc.safetensors", "u\u0308.safetensors"
    shutil.copyfile(inputs.lora, tmp_path / composed)
    (tmp_path / apart).write_bytes(b"no LoRA")
    if len(list(tmp_path.iterdir())) == 1:
        pytest.skip("this file system takes NFC and NFD for one name")
    done = run(inputs.arguments("out", lora=composed), cwd=tmp_path)
    assert (done.returncode, recorded(tmp_path / "out")[1]) == (0, composed)
    assert_refused(run(inputs.arguments("no", lora=apart), cwd=tmp_path), apart)


def test_links_slashes_and_dots(inputs: Inputs, tmp_path: Path) -> None:
    """From a folder that is reached by a link, everything relative."""
    inputs.copied(tmp_path, "base", "lora.safetensors")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "here").symlink_to("deep/er")
    (tmp_path / "deep" / "base").symlink_to("../base")
    (tmp_path / "deep" / "lora.safetensors").symlink_to(tmp_path / "lora.safetensors")
    arguments = inputs.arguments(".//out/./", base="../base//./", lora="..//./lora.safetensors")
    done = run(arguments, cwd=tmp_path / "here")
    assert_merged(done, tmp_path / "deep" / "er" / "out", inputs.wanted)
    assert not any(path.is_symlink() for path in (tmp_path / "deep" / "er" / "out").rglob("*"))


def test_the_base_is_the_current_folder(inputs: Inputs, tmp_path: Path) -> None:
    inputs.copied(tmp_path, "base", "lora.safetensors")
    done = run(inputs.arguments("../out", base=".", lora="../lora.safetensors"), cwd=tmp_path / "base")
    assert_merged(done, tmp_path / "out", inputs.wanted)
    inside = run(inputs.arguments("out", base=".", lora="../lora.safetensors"), cwd=tmp_path / "base")
    assert_refused(inside, "is inside the input", "Choose an --out apart")


GONE = ["sh", "-c", 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"']


def test_a_current_folder_that_was_removed(inputs: Inputs, tmp_path: Path) -> None:
    """torch's libraries would end the process without a word of ours."""
    before = [*GONE, str(tmp_path / "gone")]
    for arguments in (inputs.arguments(tmp_path / "out"), inputs.arguments("out")):
        done = run(arguments, before=before)
        assert_refused(done, "error: the current folder is gone", "hint: Go to a folder that exists")
    assert list(tmp_path.iterdir()) == []
    assert run(["plan", *inputs.arguments("x")[1:5]], before=before).returncode == 0
    content = run(["plan", "--content", *inputs.arguments("x")[1:5]], before=before)
    assert_refused(content, "the current folder is gone")


def test_checks_need_no_current_folder(inputs: Inputs, tmp_path: Path) -> None:
    out = inputs.base.with_name("out")
    before = [*GONE, str(tmp_path / "gone")]
    for command in ("check", "verify", "inspect"):
        assert run([command, str(out)], before=before).returncode == 0
    recomputed = ["verify", str(out), "--base", str(inputs.base), "--lora", str(inputs.lora)]
    assert_refused(run(recomputed, before=before), "the current folder is gone")


@pytest.mark.parametrize(
    "arguments",
    [["merge", "--base", "base", "--lora", "l", "--out", ""], ["check", ""], ["verify", ""], ["inspect", ""]],
    ids=str,
)
def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, arguments: list[str]) -> None:
    """What a variable of a shell gives that is not set."""
    assert_refused(run(arguments, cwd=tmp_path), "an empty text names no file")
    assert tree(tmp_path) == {}


def test_the_command_runs_from_anywhere(inputs: Inputs, tmp_path: Path) -> None:
    """By its file, too, as the console script does."""
    start = "from fuselora.__main__ import main; main()"
    done = run(inputs.arguments(tmp_path / "out"), cwd=Path("/"), command=(COMMAND[0], "-c", start))
    assert_merged(done, tmp_path / "out", inputs.wanted)
