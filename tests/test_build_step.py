"""The README's build step, run as it stands there: on a tiny pair, from a Hub on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from fuselora import synth
from fuselora.check.folder import check
from fuselora.marker import FILE_NAME
from fuselora.specs import parse_hub
from tests.hub_server import HubServer
from tests.small import tree
from tests.validated import assert_valid

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "scripts" / "build_step.sh"
IN_CI = README.partition("\n## In CI\n")[2].partition("\n## ")[0]
SIZE = synth.tiny("wan2.2-t2v-a14b", blocks=1)
SECONDS = 300
COMMANDS = ["merge", "verify", "check"]


def block(language: str) -> str:
    """The first block of a language in the section."""
    found = re.search(rf"```{language}\n(.*?)```", IN_CI, re.DOTALL)
    assert found is not None
    return found[1]


def workflow() -> dict[str, Any]:
    document = yaml.safe_load(block("yaml"))
    assert isinstance(document, dict)
    return document


def job() -> dict[str, Any]:
    (only,) = workflow()["jobs"].values()
    assert isinstance(only, dict)
    return only


def bash(script: str, folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step, in a session of its own so that nothing outlives the time limit."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    process = subprocess.Popen(
        command, cwd=folder, env=dict(environment), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, error = process.communicate(timeout=SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, error)


@dataclass(frozen=True)
class Place:
    """A folder to build in: its PATH begins with a ``fuselora`` that notes what it is asked."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def asked(self) -> list[str]:
        """The commands of fuselora that were run, in order."""
        log = self.folder / "log"
        return log.read_text().split() if log.exists() else []


def place(folder: Path, variables: Mapping[str, object], *, failing: str = "", real: bool = True) -> Place:
    """``failing`` is the command that exits with 1; without ``real`` the others do nothing."""
    program = folder / "bin" / "fuselora"
    program.parent.mkdir(parents=True)
    run = f'exec "{sys.executable}" -m fuselora "$@"' if real else "exit 0"
    lines = ["#!/bin/sh", f'echo "$1" >> "{folder}/log"', f'[ "$1" = "{failing}" ] && exit 1', run, ""]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {name: str(value) for name, value in variables.items()}
    return Place(folder, environment)


@dataclass(frozen=True)
class Inputs:
    base: Path
    high: Path
    low: Path

    def variables(self, folder: Path) -> dict[str, object]:
        return {
            "BASE": self.base, "HIGH": self.high, "LOW": self.low,
            "OUT": folder / "work" / "wan-fused", "STORE": folder / "store",
        }  # fmt: skip


def write_inputs(folder: Path) -> Inputs:
    base = synth.write_pipeline(folder / "base", SIZE, experts=True, shard_bytes=60_000)
    high = synth.write_lora(folder / "high_noise_model.safetensors", SIZE, style="lightning", alpha=2, seed=1)
    low = synth.write_lora(folder / "low_noise_model.safetensors", SIZE, style="lightning", alpha=2, seed=2)
    return Inputs(base, high, low)


# What stands there ---------------------------------------------------------------------------------


def test_the_readme_shows_the_script() -> None:
    assert block("sh") == SCRIPT.read_text(encoding="utf-8")
    assert os.access(SCRIPT, os.X_OK)


def test_the_steps_of_the_workflow_are_in_order() -> None:
    names = [step["name"] for step in job()["steps"] if "name" in step]
    assert names == ["Cache the base", "Merge", "Verify", "Check", "Upload"]
    runs = [step["run"].split()[1] for step in job()["steps"] if step.get("run", "").startswith("fuselora")]
    assert runs == COMMANDS


def test_the_workflow_and_the_script_run_the_same_commands() -> None:
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    runs = [step["run"] for step in job()["steps"] if step.get("run", "").startswith("fuselora")]
    assert runs == [line for line in lines if line.startswith("fuselora")][:3]


def test_the_workflow_stores_what_it_made_and_keeps_what_it_fetched() -> None:
    environment, steps = job()["env"], {step.get("name"): step for step in job()["steps"]}
    upload, cache = steps["Upload"]["with"], steps["Cache the base"]["with"]
    assert upload["path"] == environment["OUT"]
    assert upload["if-no-files-found"] == "error"
    assert upload["include-hidden-files"] is True  # a base's .gitattributes is one of its side files
    assert environment["HF_HOME"].endswith("/" + cache["path"])


# Run for real --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Place]:
    """The script on two paths, with another time zone, umask, hash seed and working folder."""
    places = []
    for name, more in (
        ("a", {"TZ": "UTC", "PYTHONHASHSEED": "1"}),
        ("b", {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "LC_ALL": "C"}),
    ):
        folder = tmp_path_factory.mktemp(name)
        inputs = write_inputs(folder / "deeper" / "inputs" if name == "b" else folder)
        variables = inputs.variables(folder / "build") | {"SOURCE_DATE_EPOCH": "1700000000"} | more
        at = place(folder / "build", variables)
        done = bash(f"umask {'077' if name == 'b' else '022'}; '{SCRIPT}'", folder, at.environment)
        assert done.returncode == 0, done.stderr
        places.append(at)
    return places[0], places[1]


def test_the_script_stores_a_checked_checkpoint(built: tuple[Place, Place]) -> None:
    at, _ = built
    assert at.asked == [*COMMANDS, "check"]
    stored = at.folder / "store" / "wan-fused"
    assert tree(stored) == tree(at.folder / "work" / "wan-fused")
    report = check(stored, digest=True)
    assert report.ok and report.marker is not None
    assert [lora.component for lora in report.marker.loras] == ["transformer", "transformer_2"]
    assert_valid(json.loads((stored / FILE_NAME).read_bytes()))


def test_two_builds_on_two_paths_give_the_same_bytes(built: tuple[Place, Place]) -> None:
    one, two = (tree(at.folder / "store") for at in built)
    assert one.keys() == two.keys()
    assert [path for path in one if one[path] != two[path]] == []
    assert json.loads(one[f"wan-fused/{FILE_NAME}"])["created"] == "2023-11-14T22:13:20Z"


def test_a_second_build_takes_the_place_of_the_first(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    at = place(tmp_path / "build", inputs.variables(tmp_path / "build"))
    stored = tmp_path / "build" / "store" / "wan-fused"
    fingerprints = []
    for alpha in (2, 4):
        synth.write_lora(inputs.low, SIZE, style="lightning", alpha=alpha, seed=2)
        done = bash(f"'{SCRIPT}'", tmp_path, at.environment)
        assert done.returncode == 0, done.stderr
        report = check(stored, digest=True)
        assert report.ok and report.marker is not None
        fingerprints.append(report.marker.fingerprint)
        (tmp_path / "build" / "store" / ".wan-fused.new" / "half").mkdir(parents=True)  # of a killed copy
    assert fingerprints[0] != fingerprints[1]
    assert sorted(path.name for path in stored.parent.iterdir()) == [".wan-fused.new", "wan-fused"]
    assert tree(stored) == tree(tmp_path / "build" / "work" / "wan-fused")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """The repositories that the workflow names, in small."""
    inputs = write_inputs(tmp_path / "inputs")
    address = parse_hub(job()["env"]["HIGH"])
    loras = tmp_path / "loras"
    for name, source in (("HIGH", inputs.high), ("LOW", inputs.low)):
        path = loras / parse_hub(job()["env"][name]).path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
    (inputs.base / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    with HubServer() as server:
        server.add(parse_hub(job()["env"]["BASE"]).repo, inputs.base)
        server.add(address.repo, loras)
        yield server


def test_the_workflow_runs_and_fetches_everything_once(hub: HubServer, tmp_path: Path) -> None:
    environment = job()["env"]
    variables = environment | {"HF_HOME": tmp_path / "hf", "HF_ENDPOINT": hub.url}
    at = place(tmp_path / "build", variables)
    for step in [*job()["steps"]] * 2:  # the second time in the same workspace
        if "run" in step and not step["run"].startswith("pip"):
            done = bash(step["run"], at.folder, at.environment)
            assert done.returncode == 0, done.stderr
    assert at.asked == COMMANDS * 2
    out = at.folder / environment["OUT"]
    assert check(out, digest=True).ok
    marker = json.loads((out / FILE_NAME).read_bytes())
    assert marker["base"]["source"] == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    for repo in hub.repos.values():
        for name, n_bytes in hub.fetched(repo.repo_id).items():
            assert n_bytes == repo.files[name].stat().st_size, name


# It ends at the first thing that does not hold -----------------------------------------------------


@pytest.mark.parametrize("failing", COMMANDS)
def test_nothing_is_stored_of_what_does_not_hold(failing: str, tmp_path: Path) -> None:
    inputs = Inputs(tmp_path / "base", tmp_path / "high", tmp_path / "low")
    at = place(tmp_path / "build", inputs.variables(tmp_path / "build"), failing=failing, real=False)
    done = bash(f"'{SCRIPT}'", tmp_path, at.environment)
    assert done.returncode == 1
    assert at.asked == COMMANDS[: COMMANDS.index(failing) + 1]
    assert not (tmp_path / "build" / "store").exists()


def test_a_copy_that_does_not_hold_leaves_the_stored_one_alone(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    at = place(tmp_path / "build", inputs.variables(tmp_path / "build"))
    stored = tmp_path / "build" / "store" / "wan-fused"
    stored.mkdir(parents=True)
    (stored / FILE_NAME).write_text("an earlier build's")
    program = tmp_path / "build" / "bin" / "cp"
    program.write_text('#!/bin/sh\n/bin/cp "$@" && rm "$3/model_index.json"\n')
    program.chmod(0o755)
    done = bash(f"'{SCRIPT}'", tmp_path, at.environment)
    assert done.returncode == 1
    assert "model_index.json: is missing" in done.stdout
    assert tree(stored) == {FILE_NAME: b"an earlier build's"}


def test_what_no_build_stored_is_not_replaced(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path / "base", tmp_path / "high", tmp_path / "low")
    at = place(tmp_path / "build", inputs.variables(tmp_path / "build"), real=False)
    other = tmp_path / "build" / "store" / "wan-fused" / "thesis.txt"
    other.parent.mkdir(parents=True)
    other.write_text("x")
    done = bash(f"'{SCRIPT}'", tmp_path, at.environment)
    assert (done.returncode, at.asked) == (1, [])
    assert f"{other.parent} is there and not of an earlier build" in done.stderr
    assert other.read_text() == "x"


@pytest.mark.parametrize("name", ["BASE", "HIGH", "LOW", "OUT", "STORE"])
def test_a_variable_that_is_not_set_is_named(name: str, tmp_path: Path) -> None:
    inputs = Inputs(tmp_path / "base", tmp_path / "high", tmp_path / "low")
    variables = inputs.variables(tmp_path) | {name: Path()}
    at = place(tmp_path / "build", variables, real=False)
    done = bash(f"unset {name}; '{SCRIPT}'", tmp_path, at.environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name} is not set. Usage: BASE=... HIGH=FILE LOW=FILE ")
    assert at.asked == []
