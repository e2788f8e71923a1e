from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuselora.jsonfile import MAX_BYTES
from fuselora.synth import tiny, write_lora, write_pipeline
from tests.cases.builders import COMMAND
from tests.hostile.files import FILES, named

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)
WORST = (
    "a claim of 2^63", "longer than the cap", "100,000 objects", "a million dimensions",
    "a name of a megabyte", "100,000 names that are no LoRA's",
)  # fmt: skip
# control characters of both sets, and what turns the direction of a text
RAW = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
MOST_BYTES = 200 << 20
MOST_SECONDS = 120  # it hangs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("hostile") / "base", SIZE, dtype="BF16")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(tmp_path_factory.mktemp("hostile") / "sound.safetensors", SIZE, style="comfy", rank=2)


def run(*words: object, folder: Path, limit: int = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuselora", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """In this process, as the command does; what it said on stderr."""
    with pytest.raises(SystemExit) as ended:
        COMMAND([*map(str, words)], standalone_mode=True)
    said = capsys.readouterr()
    assert ended.value.code in (1, 2), said
    assert "Traceback" not in said.err
    assert not RAW.search(said.err + said.out)
    return said.err + said.out


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", FILES)
def test_as_a_lora(name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, words = FILES[name]
    evil = tmp_path / "evil.safetensors"
    write(evil)
    before = tree(tmp_path), tree(base.parent)
    for command in ("plan", "merge"):
        said = refused(capsys, command, "--base", base, "--lora", evil, "--out", tmp_path / "out")
        assert "evil.safetensors" in said
        # not by the names of files and folders, which say it as well
        assert re.search(words, said.replace(str(tmp_path), "").replace("evil.safetensors", "")), said
    assert (tree(tmp_path), tree(base.parent)) == before


@pytest.mark.parametrize("name", [name for name in FILES if "no LoRA" not in name])
def test_as_a_base(name: str, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FILES[name][0](tmp_path / "evil.safetensors")
    before = tree(tmp_path)
    for command in (
        ("plan", "--base", tmp_path / "evil.safetensors", "--lora", lora),
        ("inspect", tmp_path / "evil.safetensors"),
    ):
        assert "evil.safetensors" in refused(capsys, *command)
    assert tree(tmp_path) == before


# as they stand in a header -> as they may be shown
NAMES = {
    "../../etc/passwd": "../../etc/passwd",
    "/etc/passwd": "/etc/passwd",
    "a\0b": r"a\x00b",
    "a\nhint: forged": r"a\nhint: forged",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x1b[2J": r"\x1b[2J",
    "\x9b2J": r"\x9b2J",
    "\u202egnp": r"\u202egnp",
    "\u2066gnp": r"\u2066gnp",
    "\ud800": "half of a surrogate pair",
}


@pytest.mark.parametrize("name", NAMES, ids=map(ascii, NAMES))
def test_names_are_shown_harmless(
    name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = tmp_path / "evil.safetensors"
    named(f"{name}.lora_A.weight")(evil)
    said = refused(capsys, "plan", "--base", base, "--lora", evil)
    assert NAMES[name] in said
    assert not any(line.startswith("hint: forged") for line in said.splitlines())
    document = refused(capsys, "plan", "--base", base, "--lora", evil, "--json")
    assert json.loads(document[document.index("{") :])["error"]


@pytest.fixture(params=["fifo", "socket", "device", "folder", "loop", "dangling"])
def no_file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Something that is called a safetensors file and is none; to open it may wait for ever."""
    path = tmp_path / "evil.safetensors"
    monkeypatch.chdir(tmp_path)  # a socket's path has 107 bytes at most
    match request.param:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case _:
            with socket.socket(socket.AF_UNIX) as opened:
                opened.bind(path.name)
                yield path
                return
    yield path


@pytest.mark.parametrize("command", ["plan", "inspect", "check", "verify"])
def test_what_is_no_file_is_not_waited_for(command: str, no_file: Path, base: Path, tmp_path: Path) -> None:
    given: dict[str, tuple[object, ...]] = {
        "plan": ("--base", base, "--lora", no_file),
        "inspect": (no_file,),
        "check": (base, "--lora", no_file),
        "verify": (no_file, "--base", base),
    }
    done = run(command, *given[command], folder=tmp_path, limit=60)
    assert done.returncode in (1, 2), done
    assert "evil" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


SIDES = {
    "the index": "transformer/diffusion_pytorch_model.safetensors.index.json",
    "a config": "transformer/config.json",
    "the pipeline's": "model_index.json",
}
TEXTS = {
    "a list": "[]",
    "brackets": "[" * 100_000,
    "objects": '{"a":' * 90_000 + "1" + "}" * 90_000,
    "deep": '{"a":' * 900 + "1" + "}" * 900,
    "a number": '{"weight_map": ' + "9" * 5000 + "}",
    "paths": json.dumps({"weight_map": {"a": "../../../etc/passwd"}}),
    "an absolute path": json.dumps({"weight_map": {"a": "/etc/passwd"}}),
    "a list of files": json.dumps({"weight_map": {"a": ["x"]}}),
    "a file that is absent": json.dumps({"weight_map": {"a": "absent.safetensors"}}),
    "nothing": "",
    "a NUL": json.dumps({"weight_map": {"a": "a\0b.safetensors"}}),
    "too long": "{" + " " * MAX_BYTES + "}",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("side", SIDES)
def test_side_files_of_a_base(
    side: str, text: str, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index has to be right; the rest is refused by name, or taken along where nothing in it is needed."""
    base = write_pipeline(tmp_path / "base", SIZE, dtype="BF16", shard_bytes=60_000, experts=False)
    (base / SIDES[side]).write_text(TEXTS[text])
    with pytest.raises(SystemExit) as ended:
        COMMAND(["plan", "--base", str(base), "--lora", str(lora), "--json"], standalone_mode=True)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    document = json.loads(said.out)
    assert ended.value.code == (1 if side == "the index" else ended.value.code and 1)
    if ended.value.code:
        told = json.dumps(document["error"])
        assert Path(SIDES[side]).name in told or "absent.safetensors" in told or "passwd" in told, told
    else:
        assert document["components"]


@pytest.mark.parametrize("name", WORST)
def test_in_little_memory(name: str, base: Path, lora: Path, tmp_path: Path) -> None:
    """Beside what the same command takes of a sound file."""
    evil = tmp_path / "evil.safetensors"
    FILES[name][0](evil)
    usual = _peak("plan", "--base", base, "--lora", lora, status=0)
    assert _peak("plan", "--base", base, "--lora", evil, status=1) - usual < MOST_BYTES


def _peak(*words: object, status: int) -> int:
    """Bytes that a command needed at most, which has to end like this."""
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True);"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "fuselora", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=MOST_SECONDS)
    ended, kilobytes = map(int, done.stdout.split())
    assert ended == status
    return kilobytes << 10
