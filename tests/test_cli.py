"""Every command as a user runs it: what it prints where, and the exit code it leaves."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fuselora import __version__
from fuselora.cli import app
from fuselora.demo import BASE, HIGH, LOW, OUT
from fuselora.interrupts import Interrupts
from fuselora.report import Reporter
from fuselora.specs import SHORT_NAMES
from fuselora.synth import tiny, write_file, write_lora, write_native, write_pipeline, write_safetensors
from tests.inputs import pair, tensor

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)
ESCAPE = "\x1b"


@dataclass(frozen=True)
class Files:
    """A pair, a single transformer, LoRAs, and a merge of the first two."""

    folder: Path
    base: Path
    single: Path
    a: Path
    b: Path
    out: Path

    @property
    def both(self) -> str:
        return f"{self.a},{self.b}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    base = write_pipeline(folder / "base", SIZE, experts=True, dtype="BF16", mixed=True, shard_bytes=60_000)
    single = write_pipeline(folder / "single", SIZE, dtype="BF16")
    a, b = (
        write_lora(folder / f"{name}.safetensors", SIZE, style="lightning", alpha=2, dtype="F32", seed=seed)
        for seed, name in enumerate("ab", start=5)
    )
    done = run("merge", "--base", base, "--lora", f"{a},{b}", "--out", folder / "out")
    assert done.exit_code == 0, done.stderr
    return Files(folder, base, single, a, b, folder / "out")


def run(*arguments: object) -> Result:
    """The command in this process, its streams apart."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuselora", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


# Help


OF_MERGE = [
    "--base", "--lora", "--high", "--low", "--out", "--dtype", "--uniform", "--variant", "--layout",
    "--skeleton", "--alpha", "--blocks", "--base-layout", "--lora-layout", "--allow-unmatched", "--strict",
    "--stack", "--device", "--kernel", "--jobs", "--assets", "--overwrite", "--restart", "--digest",
    "--no-digest", "--revision", "--json", "--quiet", "--verbose",
]  # fmt: skip
NOT_OF_PLAN = {"--assets", "--overwrite", "--restart", "--digest", "--no-digest"}
OPTIONS = {
    "merge": OF_MERGE,
    "plan": [*(o for o in OF_MERGE if o not in NOT_OF_PLAN), "--content", "--estimate"],
    "inspect": ["--json"],
    "families": ["--json"],
    "verify": ["--base", "--lora", "--skeleton", "--load", "--revision", "--json", "--quiet"],
    "check": ["--lora", "--digest", "--json"],
    "demo": ["--json", "--quiet"],
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_lists_every_option(command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    listed = set(re.findall(r"(?<!\S)--[a-z-]+(?=[\s,/]|$)", shown.stdout.partition("Options:")[2]))
    assert listed == {*OPTIONS[command], "--help"}
    assert run(command, "-h").stdout == shown.stdout


def test_the_help_names_every_command_and_short_name() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert re.findall(r"^  ([a-z]+)  ", shown.stdout, re.MULTILINE)[: len(OPTIONS)] == [*OPTIONS]
    for name, repository in SHORT_NAMES.items():
        assert re.search(rf"^ +{re.escape(name)} +{re.escape(repository)}$", shown.stdout, re.MULTILINE)
    assert "--version" in shown.stdout


def test_without_a_command_the_help_is_shown() -> None:
    shown = run()
    assert "Commands:" in shown.stdout + shown.stderr


def test_the_version() -> None:
    shown = run("--version")
    assert (shown.exit_code, shown.stdout) == (0, f"fuselora {__version__}\n")
    assert process("--version").stdout == shown.stdout


# merge


def test_merge_prints_its_result_on_stdout_and_progress_on_stderr(files: Files, tmp_path: Path) -> None:
    done = process("merge", "--base", files.base, "--lora", files.both, "--out", tmp_path / "out")
    assert done.returncode == 0
    assert f"Wrote {tmp_path / 'out'}:" in done.stdout
    assert "a.safetensors on transformer, strength 1: 10 modules (10 pairs)" in done.stdout
    assert "b.safetensors on transformer_2" in done.stdout
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["read LoRAs", "fuse"]
    assert ESCAPE not in done.stdout + done.stderr


def test_merge_quietly(files: Files, tmp_path: Path) -> None:
    done = run("merge", "--base", files.single, "--lora", files.a, "--out", tmp_path / "out", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "Wrote" in done.stdout


def test_merge_as_json(files: Files, tmp_path: Path) -> None:
    done = run("merge", "--base", files.single, "--lora", files.a, "--out", tmp_path / "out", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = document(done)
    assert found["out"] == str(tmp_path / "out")
    assert found["artifact"].startswith("sha256:") and found["fingerprint"].startswith("sha256:")
    assert (found["kept"], found["warnings"], found["pending"]) == ([], [], [])
    assert [part["fused"] for part in found["components"]] == [10]


def test_high_and_low(files: Files, tmp_path: Path) -> None:
    done = run("merge", "--base", files.base, "--high", f"{files.a}:0.5", "--low", files.b,
               "--out", tmp_path / "out", "--json")  # fmt: skip
    assert done.exit_code == 0
    assert [(lora["name"], lora["component"], lora["strength"]) for lora in document(done)["loras"]] == [
        ("a.safetensors", "transformer", 0.5),
        ("b.safetensors", "transformer_2", 1.0),
    ]


def test_the_options_reach_the_request(files: Files, tmp_path: Path) -> None:
    lora = write_safetensors(
        tmp_path / "x.safetensors", [*pair("blocks.0.attn1.to_q", 48, 48), *pair("text.q"), *pair("text.k")]
    )
    out = tmp_path / "out"
    done = run(
        "merge", "--base", files.single, "--lora", f"{lora}:2", "--out", out, "--dtype", "float32",
        "--uniform", "--alpha", f"{lora}=4", "--allow-unmatched", "text.q", "--allow-unmatched", "*.k",
        "--kernel", "reference", "--jobs", "1", "--assets", "skip", "--no-digest", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = document(done)
    assert found["components"][0]["dtype"] == "float32"
    assert found["loras"][0]["scales"] == [
        {"scale": 4.0, "alpha": 4.0, "rank": 2, "source": "option", "modules": 1}
    ]
    assert [len(group["modules"]) for group in found["loras"][0]["skipped"]] == [2]
    assert found["artifact"] is None
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        "fused.json", "transformer/diffusion_pytorch_model.safetensors",
    }  # fmt: skip
    assert json.loads((out / "fused.json").read_text())["math"]["kernel"] == "reference"


def test_overwrite_restart_and_stack(files: Files, tmp_path: Path) -> None:
    merge = ("merge", "--base", files.single, "--out", tmp_path / "out", "--json")
    assert run(*merge, "--lora", files.a).exit_code == 0
    refused = run(*merge, "--lora", files.b)
    assert (refused.exit_code, document(refused)["error"]["code"]) == (1, "output")
    assert run(*merge, "--lora", files.b, "--overwrite", "--restart").exit_code == 0
    again = ("merge", "--base", tmp_path / "out", "--lora", files.a, "--out", tmp_path / "two", "--json")
    assert document(run(*again))["error"]["faults"][0]["kind"] == "already_fused"
    assert run(*again, "--stack").exit_code == 0


def test_warnings_are_on_stderr(files: Files, tmp_path: Path) -> None:
    lora = write_safetensors(
        tmp_path / "x.safetensors", [*pair("blocks.0.attn1.to_q", 48, 48), tensor("text.diff", 4, value=0)]
    )
    plan = ("plan", "--base", files.single, "--lora", lora)
    found = run(*plan)
    assert found.stderr == "warning: x.safetensors: 1 module not applied: all values are zero\n"
    assert "warning" not in found.stdout
    assert run(*plan, "--quiet").stderr == ""
    strict = run(*plan, "--strict")
    assert strict.exit_code == 1
    assert "--strict allows no skips" in strict.stderr


# Refusals


@pytest.mark.parametrize("command", ["merge", "plan"])
def test_a_refusal_is_on_stderr_and_ends_with_1(files: Files, tmp_path: Path, command: str) -> None:
    out = () if command == "plan" else ("--out", tmp_path / "out")
    done = run(command, "--base", files.base, "--lora", files.a, *out)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: a.safetensors: was given for none of this base's two experts")
    assert "hint: Say which: --lora HIGH.safetensors,LOW.safetensors" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["merge", "plan"])
def test_a_refusal_as_json_is_one_document(files: Files, tmp_path: Path, command: str) -> None:
    lora = write_safetensors(tmp_path / "x.safetensors", [*pair("blocks.0.attn1.to_q", 3, 3), *pair("y")])
    done = run(command, "--base", files.single, "--lora", lora, "--json")
    assert done.exit_code == 1
    error = document(done)["error"]
    assert set(error) == {"code", "message", "hint", "faults"}
    assert error["code"] == "refused"
    assert sorted((fault["kind"], fault["key"], fault["path"]) for fault in error["faults"]) == [
        ("shape", "blocks.0.attn1.to_q", "x.safetensors"),
        ("unmatched", "y", "x.safetensors"),
    ]
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("loras", "code"),
    [(["{a},{a}"], "refused"), (["{a},{folder}/absent.safetensors"], "input"), (["{folder}/base"], "input")],
)
def test_other_refusals(files: Files, loras: list[str], code: str) -> None:
    texts = [text.format(a=files.a, folder=files.folder) for text in loras]
    done = run("plan", "--base", files.base, *(x for text in texts for x in ("--lora", text)), "--json")
    assert (done.exit_code, document(done)["error"]["code"]) == (1, code)


def test_a_base_that_does_not_exist(files: Files) -> None:
    done = run("plan", "--base", files.folder / "absent", "--lora", files.a)
    assert done.exit_code == 1
    assert "absent: no such file or folder" in done.stderr


def test_no_traceback_for_a_broken_file(files: Files, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04 a pickle")
    done = process("plan", "--base", files.single, "--lora", tmp_path / "x.safetensors")
    assert done.returncode == 1
    assert "pickle" in done.stderr and "Traceback" not in done.stderr


# Usage


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "--base", "x"),
        ("plan", "--base", "x", "--lora", ""),
        ("plan", "--base", "x", "--lora", "high=a,b"),
        ("plan", "--base", "x", "--lora", "y:nan"),
        ("plan", "--base", "x", "--lora", "y", "--alpha", "eight"),
        ("plan", "--base", "x", "--high", "a,b"),
    ],
)
def test_options_that_make_no_sense(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    as_json = run(*arguments, "--json")
    assert (as_json.exit_code, document(as_json)["error"]["code"]) == (2, "usage")


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge",),
        ("merge", "--lora", "x"),
        ("merge", "--base", "x", "--lora", "y", "--dtype", "int8"),
        ("merge", "--base", "x", "--lora", "y", "--jobs", "0"),
        ("merge", "--base", "x", "--lora", "y", "--unheard-of"),
        ("plan", "--base", "x", "--lora", "y", "--overwrite"),
        ("unmerge",),
        ("inspect",),
        ("check",),
        ("verify",),
        ("demo", "a", "b"),
    ],
)
def test_a_command_line_that_cannot_be_read(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error" in done.stderr or "error" in done.stderr
    as_json = run(*arguments, "--json")
    error = document(as_json)["error"]
    assert (as_json.exit_code, error["code"]) == (2, "usage")
    assert as_json.stderr.splitlines()[0] == f"error: {error['message']}"


def test_verify_with_loras_and_no_base(files: Files) -> None:
    done = run("verify", files.out, "--lora", files.a)
    assert done.exit_code == 2
    assert "--base" in done.stderr


# plan


def test_plan_writes_nothing(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("plan", "--base", files.base, "--lora", files.both)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "Pending without --content" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_plan_as_json(files: Files) -> None:
    from_headers = document(run("plan", "--base", files.base, "--lora", files.both, "--json"))
    assert from_headers["fingerprint"] is None
    assert from_headers["pending"]
    whole = document(run("plan", "--base", files.base, "--lora", files.both, "--json", "--content"))
    assert whole["fingerprint"] == json.loads((files.out / "fused.json").read_text())["fingerprint"]
    assert whole["pending"] == []


# check


def test_check(files: Files) -> None:
    done = run("check", files.out)
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"{files.out}: fused and whole" in done.stdout
    assert "holds a.safetensors on transformer, strength 1" in done.stdout
    assert run("check", files.out, "--digest").exit_code == 0


def test_check_a_lora_that_is_in_it(files: Files, tmp_path: Path) -> None:
    renamed = shutil.copy(files.a, tmp_path / "renamed.safetensors")
    done = run("check", files.out, "--lora", renamed)
    assert done.exit_code == 1
    assert f"{renamed}: fused already, on transformer as a.safetensors" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{files.out}: no, fusing {renamed} again")
    other = write_lora(tmp_path / "c.safetensors", SIZE)
    assert run("check", files.out, "--lora", other).exit_code == 0
    found = document(run("check", files.out, "--lora", renamed, "--lora", other, "--json"))
    assert set(found) == {
        "ok", "fused", "whole", "schema", "fingerprint", "artifact", "artifact_on_disk", "findings", "holds",
        "loras", "policy", "note",
    }  # fmt: skip
    assert (found["ok"], found["fused"], found["whole"]) == (False, True, True)
    assert [bool(lora["already_fused"]) for lora in found["loras"]] == [True, False]
    assert [lora["name"] for lora in found["holds"]] == ["a.safetensors", "b.safetensors"]


def test_check_a_folder_that_is_not_fused(files: Files) -> None:
    done = run("check", files.base)
    assert done.exit_code == 1
    assert f"{files.base}: not fused" in done.stdout
    assert document(run("check", files.base, "--json"))["fused"] is False


def test_check_a_damaged_folder(files: Files, tmp_path: Path) -> None:
    out = Path(shutil.copytree(files.out, tmp_path / "out"))
    shard = next((out / "transformer").glob("*.safetensors"))
    with shard.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")
    for digest in ((), ("--digest",)):
        done = run("check", out, *digest)
        assert done.exit_code == 1
        assert f"{shard.name}: was changed" in done.stdout
    shard.unlink()
    missing = run("check", out)
    assert missing.exit_code == 1
    assert "fused, but not whole" in missing.stdout


def test_check_what_does_not_exist(tmp_path: Path) -> None:
    done = run("check", tmp_path / "absent", "--json")
    assert done.exit_code == 1
    assert "absent" in document(done)["error"]["message"]


# verify


def test_verify(files: Files) -> None:
    inputs = ("--base", files.base, "--lora", files.a, "--lora", files.b)
    done = run("verify", files.out, *inputs)
    assert done.exit_code == 0
    assert f"{files.out}: verified" in done.stdout
    assert done.stderr.splitlines()[0].startswith("check digests:")
    assert run("verify", files.out, *inputs, "--quiet").stderr == ""
    found = document(run("verify", files.out, *inputs, "--json"))
    assert set(found) == {"ok", "digests_checked", "components", "findings", "not_compared", "loaded"}
    assert (found["ok"], found["findings"]) == (True, [])
    assert [part["fused"] for part in found["components"]] == [10, 10]


def test_verify_against_the_wrong_lora(files: Files, tmp_path: Path) -> None:
    other = write_lora(tmp_path / "c.safetensors", SIZE)
    done = run("verify", files.out, "--base", files.base, "--lora", files.a, "--lora", other, "--json")
    assert done.exit_code == 1
    assert document(done)["ok"] is False
    words = run("verify", files.out, "--base", files.base, "--lora", files.a, "--lora", other)
    assert f"{files.out}: does not hold" in words.stdout


# inspect


def test_inspect(files: Files) -> None:
    paths = (files.a, files.base, files.out, files.single / "transformer")
    done = run("inspect", *paths)
    assert (done.exit_code, done.stderr) == (0, "")
    for path in paths:
        assert str(path) in done.stdout
    found = document(run("inspect", *paths, "--json"))
    assert len(found["files"]) == len(paths)


def test_inspect_what_it_cannot_read(files: Files, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"GGUF")
    done = run("inspect", tmp_path / "x.safetensors", "--json")
    assert done.exit_code == 1
    assert "GGUF" in document(done)["error"]["message"]


def test_inspect_reports_what_it_can_read_beside_what_it_cannot(files: Files, tmp_path: Path) -> None:
    broken, missing = tmp_path / "x.safetensors", tmp_path / "missing"
    broken.write_bytes(b"GGUF")
    paths = (files.a, broken, files.b, missing)
    done = run("inspect", *paths)
    assert done.exit_code == 1
    titles = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert titles == [f"{path}: a LoRA for wan" for path in (files.a, files.b)]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert (str(broken) in errors[0], errors[1]) == (True, f"error: {missing}: no such file or folder")
    as_json = run("inspect", *paths, "--json")
    found = document(as_json)
    assert (as_json.exit_code, as_json.stderr) == (1, done.stderr)
    assert [(one["kind"], one["path"]) for one in found["files"]] == [
        ("lora", str(files.a)), ("error", str(broken)), ("lora", str(files.b)), ("error", str(missing)),
    ]  # fmt: skip
    assert found["files"][3]["error"]["message"] == f"{missing}: no such file or folder"
    assert found["error"] == found["files"][1]["error"]


# demo


def test_the_demo_in_a_new_folder_and_again(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    for _ in range(2):
        done = run("demo", folder)
        assert done.exit_code == 0, done.stderr
        assert "verified" in done.stdout
        assert {path.name for path in folder.iterdir()} == {BASE, OUT, HIGH, LOW}
    assert (folder / OUT / "fused.json").is_file()


@pytest.mark.parametrize("stage", [(), (f"{OUT}.partial",)])
def test_a_demo_that_was_cut_short_is_made_again(tmp_path: Path, stage: tuple[str, ...]) -> None:
    for name in (f"{BASE}/transformer", *stage):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / HIGH).write_bytes(b"half")
    assert run("demo", tmp_path).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {BASE, OUT, HIGH, LOW}


def test_the_demo_s_own_commands_run(tmp_path: Path) -> None:
    done = run("demo", tmp_path / "demo")
    merge, verify = re.findall(r"^  fuselora (.+)$", done.stdout, re.MULTILINE)
    assert run(*merge.split()).exit_code == 0
    assert run(*verify.split()).exit_code == 0
    assert run("demo", tmp_path / "demo").exit_code == 0


def test_the_demo_as_json_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    done = run("demo", tmp_path / "demo", "--json", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    found = document(done)
    assert found["verified"] is True
    assert [part["fused"] for part in found["components"]] == [20, 20]


def test_the_demo_s_folder_has_a_name_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("demo", "--quiet").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["fuselora-demo"]


@pytest.mark.parametrize("what", ["file", "folder", "fused"])
def test_the_demo_leaves_other_folders_alone(files: Files, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "mine"
    if what == "file":
        folder.write_text("x")
    elif what == "folder":
        folder.mkdir()
        (folder / "precious.txt").write_text("x")
    else:
        folder.mkdir()
        shutil.copytree(files.out, folder / OUT)
    before = sorted(tmp_path.rglob("*"))
    done = run("demo", folder)
    assert done.exit_code == 1
    assert "mine" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


# Other bases


def test_a_native_pair_and_one_file(files: Files, tmp_path: Path) -> None:
    native = write_native(tmp_path / "native", SIZE, experts=True)
    found = document(run("plan", "--base", native, "--lora", files.both, "--json"))
    assert (found["base"]["container"], found["base"]["layout"]) == ("experts", "native")
    one = write_file(tmp_path / "one.safetensors", SIZE)
    found = document(run("plan", "--base", one, "--lora", files.a, "--json"))
    assert (found["base"]["container"], found["components"][0]["fused"]) == ("file", 10)


def test_names_with_commas_colons_and_spaces(files: Files, tmp_path: Path) -> None:
    for name in ("a, b:0.5.safetensors", "-dash ü 中.safetensors", "high=x.safetensors"):
        lora = shutil.copy(files.a, tmp_path / name)
        found = document(run("plan", "--base", files.single, "--lora", lora, "--json"))
        assert (found["loras"][0]["name"], found["loras"][0]["strength"]) == (name, 1.0)


# Terminals


def on_a_terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """The command with both streams on a terminal of 80 columns."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **environment}
    command = [sys.executable, "-m", "fuselora", *map(str, arguments)]
    running = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    seen = b""
    while select.select([master], [], [], 60)[0]:
        try:
            block = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
    os.close(master)
    return running.wait(60), seen.decode()


def test_a_merge_on_a_terminal(files: Files, tmp_path: Path) -> None:
    merge = ("merge", "--base", files.base, "--lora", files.both, "--out")
    code, seen = on_a_terminal(*merge, tmp_path / "out")
    assert code == 0
    assert "100%" in seen or "fuse" in seen
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert all(len(line) <= 80 for part in plain.split("\n") for line in part.split("\r"))
    assert "…" not in plain


def test_no_color_on_a_terminal(files: Files) -> None:
    plan = ("plan", "--base", files.base, "--lora", files.both)
    code, seen = on_a_terminal(*plan, NO_COLOR="1")
    assert code == 0
    assert ESCAPE not in seen
    assert ESCAPE in on_a_terminal(*plan)[1]


# Interruption

SLOW = """
import time
from fuselora.engine.sink import Sink

write = Sink.write

def slowly(sink, segment):
    time.sleep(0.2)
    write(sink, segment)

Sink.write = slowly
from fuselora.__main__ import main
main()
"""


def interrupted(*arguments: object) -> tuple[int, str, str]:
    """A slow merge that gets SIGINT once it has begun to write."""
    command = [sys.executable, "-c", SLOW, *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    said = ""
    while not said.endswith("\n") or "fuse:" not in said:
        line = running.stderr.readline()
        assert line, "the merge ended before it was interrupted"
        said += line
    running.send_signal(signal.SIGINT)
    out, rest = running.communicate(timeout=60)
    return running.returncode, out, said + rest


def test_an_interrupted_merge_ends_with_130_and_leaves_no_output(files: Files, tmp_path: Path) -> None:
    merge = ("merge", "--base", files.base, "--lora", files.both, "--out", tmp_path / "out")
    code, out, said = interrupted(*merge)
    assert (code, out) == (130, "")
    assert said.endswith("interrupted\n")
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert run(*merge).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run("check", tmp_path / "out", "--digest").exit_code == 0


def test_an_interruption_that_an_import_swallowed_ends_the_next_phase() -> None:
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    with interrupts.remembered():
        interrupts.check()
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        reporter = Reporter(quiet=True, check=interrupts.check)
        with pytest.raises(KeyboardInterrupt), reporter.phase("fuse", 1):
            pass
    assert signal.getsignal(signal.SIGINT) is before


def test_families_as_data() -> None:
    found = {row["family"]: row for row in document(run("families", "--json"))["families"]}
    assert len(found) >= 16
    assert found["flux.1"]["layouts"][:2] == ["diffusers", "native"]
    assert "FLUX.1-dev" in found["flux.1"]["models"]
    assert found["minimax-h3"]["layouts_to_tell"].keys() == {"raw"}
    assert found["wan"]["few_step"][0]["num_inference_steps"] == 4
