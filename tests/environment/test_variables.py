"""No variable of the environment and no option of Python changes what a merge writes."""

from __future__ import annotations

from pathlib import Path

import pytest

import fuselora
from fuselora.errors import UsageError
from tests.environment.merges import COMMAND, ROOT, Inputs, assert_merged, environment, run

NOWHERE = "/proc/self/nowhere"  # can be neither written nor made
FOLDERS = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR", "TEMP", "TMP")
VARIABLES = {
    "folders that cannot be": dict.fromkeys(FOLDERS, NOWHERE),
    "folders of no name": dict.fromkeys(FOLDERS, ""),
    "a narrow terminal": {"COLUMNS": "1", "LINES": "1", "FORCE_COLOR": "1", "TERM": "xterm"},
    "an impossible terminal": {"COLUMNS": "-3", "LINES": "x", "FORCE_COLOR": "1", "TERM": "dumb"},
    "a terminal that does not know its size": {"COLUMNS": "0", "LINES": "0"},
    "no colour and much room": {"COLUMNS": "9999999999", "NO_COLOR": "1"},
    "another clock and language": {"TZ": "Asia/Kathmandu", "LC_ALL": "xx_YY.none"},
    "no clock": {"TZ": ":/dev/null", "LC_ALL": "C"},
    "a network that leads nowhere": {
        "HTTPS_PROXY": "bogus", "HF_ENDPOINT": "::", "HF_HUB_DOWNLOAD_TIMEOUT": "x", "HF_TOKEN": "x",
    },
    "threads and devices": {"OMP_NUM_THREADS": "x", "MKL_NUM_THREADS": "-1", "CUDA_VISIBLE_DEVICES": "x"},
    "Python's own": {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "7", "PYTHONWARNINGS": "error"},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_variables(inputs: Inputs, tmp_path: Path, name: str) -> None:
    done = run(inputs.arguments(tmp_path / "out"), env=environment(VARIABLES[name]))
    assert_merged(done, tmp_path / "out", inputs.wanted)


def test_no_home_and_no_other_variable(inputs: Inputs, tmp_path: Path) -> None:
    done = run(inputs.arguments(tmp_path / "out"), env=environment(bare=True))
    assert_merged(done, tmp_path / "out", inputs.wanted)


@pytest.mark.parametrize(
    "options", [("-O",), ("-W", "error"), ("-X", "dev", "-bb"), ("-X", "utf8=0")], ids=str
)
def test_options_of_python(inputs: Inputs, tmp_path: Path, options: tuple[str, ...]) -> None:
    command = (COMMAND[0], *options, *COMMAND[1:])
    done = run(inputs.arguments(tmp_path / "out"), command=command)
    assert_merged(done, tmp_path / "out", inputs.wanted)


def test_python_that_takes_nothing_from_outside(inputs: Inputs, tmp_path: Path) -> None:
    """-I reads neither variables nor the user's packages."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from fuselora.__main__ import main; main()"
    done = run(inputs.arguments(tmp_path / "out"), command=(COMMAND[0], "-I", "-c", start))
    assert_merged(done, tmp_path / "out", inputs.wanted)


ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_a_terminal_that_cannot_spell_the_names(inputs: Inputs, tmp_path: Path, encoding: str) -> None:
    inputs.copied(tmp_path, "modèle 模型", "лора.safetensors")
    arguments = inputs.arguments("выход", base="modèle 模型", lora="лора.safetensors")
    env = environment({**ASCII, "PYTHONIOENCODING": encoding})
    done = run(arguments, env=env, cwd=tmp_path)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert encoding == "utf-16" or b"\\u6a21\\u578b" in done.stdout
    assert (tmp_path / "выход" / "fused.json").read_text("utf-8").count("лора.safetensors") == 1


@pytest.mark.parametrize(
    "epoch", ["", "yesterday", "1e9", " 5 ", "1_0", "\uff11\uff12", "1.5", "9" * 20, "253402300800", "--1"]
)
def test_an_epoch_that_is_no_number_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, epoch: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
        fuselora.merge(NOWHERE, [NOWHERE])
