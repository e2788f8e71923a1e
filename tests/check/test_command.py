"""python -m fuselora.marker: the preflight that needs nothing but the standard library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fuselora
from fuselora.check.command import EXIT_CODES, lora_paths, main
from fuselora.check.folder import check
from fuselora.cli import app
from fuselora.digest import content_sha256
from fuselora.errors import InputError, UsageError
from fuselora.marker import FILE_NAME, SCHEMA
from tests.marked import (
    CONFIG,
    FINGERPRINT,
    FUSED_SHARD,
    changed,
    load,
    store,
    write_fused,
    write_lora,
)

PACKAGE = Path(fuselora.__file__).parent
ODD = "a\u202eb\u2028c\r\td\ne\x1b[31m"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_fused(tmp_path / "out")


@pytest.fixture
def lora(out: Path) -> Path:
    return out.parent / "lora.safetensors"


def other_lora(folder: Path) -> Path:
    return write_lora(folder / "lora-2.safetensors", first=b"zzzz")


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str, str]:
    """Exit code, stdout and stderr."""
    try:
        code: int | str | None = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# Exit codes and what is said -----------------------------------------------------------------------


def test_exit_0_and_what_it_holds(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = other_lora(tmp_path)
    lines = [f"{out}: fused and whole", "  holds lora.safetensors on transformer, strength 1"]
    assert said(capsys, out) == (0, "\n".join(lines) + "\n", "")
    policy = "distill_lora refuse, dynamic_lora allow"
    lines.append(f"  {other}: not in it, tensor for tensor; the policy for other LoRAs: {policy}")
    assert said(capsys, out, "--digest", "--lora", other) == (0, "\n".join(lines) + "\n", "")


def test_exit_1_for_a_lora_that_is_in_it(
    out: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = said(capsys, out, "--lora", other_lora(tmp_path), "--lora", lora)
    assert code == 1
    assert text.splitlines()[-2:] == [
        f"  {lora}: fused already, on transformer as lora.safetensors",
        f"{out}: no, fusing {lora} again would apply it twice; serve without it",
    ]


def test_the_globs_of_blocks_are_said(out: Path, lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [{"glob": "*.ffn", "strength": 0.5}, {"glob": "blocks.0", "strength": 0}]
    store(out, changed(load(out), "loras.0.blocks", blocks))
    code, text, _ = said(capsys, out)
    assert code == 0
    assert "  holds lora.safetensors on transformer, strength 1, --blocks *.ffn=0.5, blocks.0=0\n" in text
    code, text, _ = said(capsys, out, "--lora", lora, "--json")
    assert (code, json.loads(text)["holds"][0]["blocks"]) == (1, blocks)


@pytest.mark.parametrize(
    ("field", "value", "strength"),
    [("strength", 0, "0"), ("applied", {"pairs": 0, "diff": 0, "diff_b": 0, "replace": 0}, "1")],
)
def test_a_lora_of_which_nothing_was_added_may_be_served(
    out: Path, lora: Path, capsys: pytest.CaptureFixture[str], field: str, value: object, strength: str
) -> None:
    store(out, changed(load(out), f"loras.0.{field}", value))
    code, text, _ = said(capsys, out, "--lora", lora)
    policy = "distill_lora refuse, dynamic_lora allow"
    assert (code, text.splitlines()) == (
        0,
        [
            f"{out}: fused and whole",
            f"  holds lora.safetensors on transformer, strength {strength}, nothing of it added",
            f"  {lora}: is listed, on transformer as lora.safetensors, and nothing of it was added; "
            f"the policy for other LoRAs: {policy}",
        ],
    )
    _, text, _ = said(capsys, out, "--lora", lora, "--json")
    (asked,) = json.loads(text)["loras"]
    assert (asked["already_fused"], [one["name"] for one in asked["nothing_added"]]) == ([], [lora.name])


def test_exit_1_for_what_is_not_whole(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / CONFIG).unlink()
    code, text, error = said(capsys, out)
    assert (code, error) == (1, "")
    assert text.splitlines()[:3] == [
        f"{out}: fused, but not whole",
        f"  {CONFIG}: is missing",
        "  hint: Copy the whole folder again, or fuse again; no file in it is edited by hand.",
    ]


def test_exit_1_for_what_is_not_fused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = said(capsys, tmp_path)
    assert (code, error) == (1, "")
    assert text.splitlines() == [
        f"{tmp_path}: not fused",
        "  fused.json: is not there",
        "  hint: Name the folder that fuselora merge wrote.",
    ]


def test_nobody_can_tell_what_is_in_it_without_a_marker(
    out: Path, lora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / FILE_NAME).unlink()
    code, text, _ = said(capsys, out, "--lora", lora)
    assert code == 1
    assert text.splitlines()[-1] == f"  {lora}: nobody can tell without a sound fused.json"
    _, text, _ = said(capsys, out, "--lora", lora, "--json")
    report = json.loads(text)
    assert (report["holds"], report["loras"][0]["already_fused"], report["ok"]) == ([], None, False)


def test_many_findings_are_cut(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(25):
        (out / f"{n:02}.bin").touch()
    _, text, _ = said(capsys, out)
    assert text.count("does not list") == 20
    assert "... and 5 more (--json lists them)" in text
    _, text, _ = said(capsys, out, "--json")
    assert len(json.loads(text)["findings"]) == 25


def test_a_newer_minor_is_said_to_be_one(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(out, load(out) | {"schema": "fuselora.fused/1.7"})
    code, text, _ = said(capsys, out)
    assert code == 0
    assert "fused.json is fuselora.fused/1.7, newer than this fuselora" in text


@pytest.mark.parametrize("arguments", [[], ["--nonsense", "x"], ["x", "y"], ["x", "--lora"], ["x", "--dig"]])
def test_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = said(capsys, *arguments)
    assert (code, text) == (2, "")
    assert error.startswith("usage: python -m fuselora.marker")
    code, text, as_text = said(capsys, *arguments, "--json")
    document = json.loads(text)["error"]
    assert (code, document["code"]) == (2, "usage")
    assert document["message"] in as_text


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = said(capsys, "--help")
    assert code == 0
    assert "Exit code: 0 if it is fused and whole" in text


def test_an_error_goes_to_stderr_with_its_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = said(capsys, tmp_path / "absent", "--json")
    assert code == 1
    assert error.splitlines() == [
        f"error: {tmp_path / 'absent'}: is not a folder: nothing has that name",
        "hint: Name the folder that fuselora merge wrote.",
    ]
    assert json.loads(text)["error"]["code"] == "input"


def test_ctrl_c_is_no_traceback(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fuselora.check.command.check", interrupted)
    assert said(capsys, out) == (130, "", "interrupted\n")


def test_json(out: Path, lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / CONFIG).write_text('{"dim": 8}')
    code, text, error = said(capsys, out, "--lora", lora, "--json", "--digest")
    assert (code, error) == (1, "")
    report = json.loads(text)
    assert (report["ok"], report["fused"], report["whole"]) == (False, True, False)
    assert (report["schema"], report["fingerprint"]) == (SCHEMA, FINGERPRINT)
    assert report["artifact"] != report["artifact_on_disk"]
    (finding,) = report["findings"]
    assert (finding["code"], finding["path"]) == ("content", CONFIG)
    assert finding["hint"].startswith("Copy the whole folder again")
    held = {
        "name": "lora.safetensors", "component": "transformer", "strength": 1.0, "blocks": [],
        "content_sha256": content_sha256(lora),
    }  # fmt: skip
    assert report["holds"] == [held]
    assert report["policy"] == {"distill_lora": "refuse", "dynamic_lora": "allow"}
    asked = {"path": str(lora), "content_sha256": content_sha256(lora)}
    assert report["loras"] == [{**asked, "already_fused": [held], "nothing_added": []}]


def test_the_loras_that_are_held_are_listed_without_asking(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, _ = said(capsys, out, "--json")
    report = json.loads(text)
    assert [record["name"] for record in report["holds"]] == ["lora.safetensors"]
    assert report["loras"] == []


def test_names_from_files_reach_the_terminal_escaped(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(out, changed(load(out), "loras.0.name", "\x1b[31mü\udcff\n"))
    code, text, _ = said(capsys, out)
    assert code == 0
    assert "holds \\x1b[31mü\\udcff\\n on transformer" in text


# The LoRAs asked about -----------------------------------------------------------------------------


def test_several_loras_and_lists(out: Path, lora: Path, tmp_path: Path) -> None:
    other = other_lora(tmp_path)
    assert lora_paths([f"{other},{lora}", str(other)]) == [other, lora, other]
    report = check(out, loras=lora_paths([f"{other},{lora}"]))
    assert [bool(outcome.records) for outcome in report.loras] == [False, True]


def test_names_with_commas_colons_and_equal_signs_are_names(lora: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copy(lora, tmp_path / "high=a,b:0.5"))
    assert lora_paths([str(odd), f"{lora},{odd}"]) == [odd, lora, odd]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "anything.safetensors"])
def test_an_adapter_folder_is_a_lora(out: Path, lora: Path, tmp_path: Path, name: str) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(lora, adapter / name)
    (adapter / "adapter_config.json").write_text("{}")
    report = check(out, loras=lora_paths([str(adapter)]))
    assert [(outcome.path, len(outcome.records)) for outcome in report.loras] == [(adapter, 1)]


def test_a_folder_without_a_lora_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: holds no LoRA"):
        check(out, loras=[tmp_path / "empty"])


@pytest.mark.parametrize("spec", ["transformer={}", "{}:0.8", "high={},low=x"])
def test_a_component_or_a_strength_is_usage(lora: Path, spec: str) -> None:
    with pytest.raises(UsageError, match="check compares contents") as caught:
        lora_paths([spec.format(lora)])
    assert caught.value.hint is not None and "Give FILE alone" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "hint"), [("gone.safetensors", None), ("hf://a/b/c.safetensors", "Fetch it first")]
)
def test_a_lora_that_is_not_there(text: str, hint: str | None) -> None:
    with pytest.raises(InputError, match="no such file or folder") as caught:
        lora_paths([text])
    assert (caught.value.hint or "").startswith(hint or "")


# The same as the command ---------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    "state", ["whole", "asked", "broken", "edited", "absent", "a file", "bad spec", "twice", "odd"]
)
def test_fuselora_check_says_and_exits_the_same(
    out: Path, lora: Path, capsys: pytest.CaptureFixture[str], state: str, as_json: list[str]
) -> None:
    arguments = [str(out)]
    if state == "asked":
        arguments += ["--lora", str(lora), "--digest"]
    elif state == "broken":
        (out / CONFIG).unlink()
    elif state == "edited":
        (out / FILE_NAME).write_text(json.dumps(load(out) | {"new": "x"}))
    elif state == "absent":
        arguments = [str(out / "absent")]
    elif state == "a file":
        arguments = [str(out / FUSED_SHARD)]
    elif state == "bad spec":
        arguments += ["--lora", f"{lora}:2"]
    elif state == "twice":
        arguments += ["--lora", f"{lora},{lora}"]
    elif state == "odd":
        (out / f"{ODD}.bin").touch()
        arguments += ["--lora", str(shutil.copy(lora, lora.with_name(ODD)))]
    command = CliRunner().invoke(app, ["check", *arguments, *as_json], catch_exceptions=False)
    assert (command.exit_code, command.stdout, command.stderr) == said(capsys, *arguments, *as_json)
    assert command.exit_code == {"whole": 0, "bad spec": 2}.get(state, 1)


def test_the_two_name_the_same_exit_codes() -> None:
    shown = " ".join(CliRunner().invoke(app, ["check", "--help"]).stdout.split())
    assert f"Exit code: {EXIT_CODES}." in shown


# Nothing but the standard library ------------------------------------------------------------------


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


LIST_MODULES = """
import runpy, sys
sys.argv = ["fuselora.marker", *sys.argv[1:]]
try:
    runpy.run_module("fuselora.marker", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print("status", ended.code)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
FOREIGN = {"torch", "typer", "rich", "safetensors", "huggingface_hub", "numpy", "diffusers", "jsonschema"}


def test_the_command_imports_nothing_but_the_standard_library(out: Path, lora: Path) -> None:
    arguments = [str(out), "--digest", "--lora", str(lora), "--json"]
    done = run([sys.executable, "-c", LIST_MODULES, *arguments], PACKAGE.parent)
    assert "status 1" in done.stdout, done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert "fuselora" in modules
    assert not modules & FOREIGN


def test_a_bare_copy_of_the_package_is_enough(out: Path, tmp_path: Path) -> None:
    """Under -S there are no installed packages at all."""
    shutil.copytree(PACKAGE, tmp_path / "bare" / "fuselora", ignore=shutil.ignore_patterns("__pycache__"))
    done = run([sys.executable, "-S", "-m", "fuselora.marker", str(out), "--digest"], tmp_path / "bare")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fused and whole" in done.stdout
    listed_modules = run([sys.executable, "-S", "-c", LIST_MODULES, str(out)], tmp_path / "bare").stdout
    modules = set(listed_modules.splitlines()[-1].split())
    assert modules - sys.stdlib_module_names - {"fuselora", "__main__"} == set()


def test_reading_a_marker_does_not_load_the_checks() -> None:
    text = "import sys; from fuselora.marker import read_marker; print(*sys.modules)"
    modules = set(run([sys.executable, "-c", text], PACKAGE.parent).stdout.split())
    assert "fuselora.marker" in modules
    assert not modules & {
        "fuselora.check.folder",
        "fuselora.check.report",
        "fuselora.check.command",
        "argparse",
    }
