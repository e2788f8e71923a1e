"""What stays unimported: starting, planning and reading a marker must not cost seconds of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuselora import synth

HEAVY = (
    "torch",
    "numpy",
    "safetensors",
    "diffusers",
    "transformers",
    "huggingface_hub",
    "rich",
    "typer",
    "click",
)
SIZE = synth.tiny("wan2.2-t2v-a14b", blocks=1)


def modules_after(code: str, cwd: Path | None = None) -> set[str]:
    """The modules in memory after ``code`` has run in a fresh interpreter, whether or not it exits."""
    probe = f"""
import json, sys
started = set(sys.modules)
try:
    exec({code!r})
except SystemExit as error:
    assert not error.code, error.code
print("MODULES" + json.dumps(sorted(set(sys.modules) - started)))
"""
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.rpartition("MODULES")[2])
    return set(found)


def foreign(modules: set[str]) -> set[str]:
    """Top-level packages that are neither ours nor the standard library's."""
    top = {name.partition(".")[0] for name in modules}
    return {name for name in top if name not in sys.stdlib_module_names and name != "fuselora"}


def heavy(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} & set(HEAVY)


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("fuselora")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    synth.write_pipeline(folder / "base", SIZE, experts=True, dtype="BF16")
    synth.write_lora(folder / "high.safetensors", SIZE, alpha=2)
    synth.write_lora(folder / "low.safetensors", SIZE, style="peft")
    return folder


def test_the_probe_sees_what_is_imported() -> None:
    assert heavy(modules_after("import numpy")) == foreign(modules_after("import numpy")) == {"numpy"}


def test_importing_the_package_loads_the_standard_library_alone() -> None:
    modules = modules_after("import fuselora")
    assert ours(modules) == {"fuselora"}
    assert not foreign(modules)


@pytest.mark.parametrize(
    "module",
    [
        "marker",
        "digest",
        "header",
        "errors",
        "specs",
        "reading",
        "lora.scale",
        "lora.sampling",
        "serving_notes",
        "filenames",
        "escape",
        "check.folder",
        "check.strays",
        "check.report",
        "check.command",
    ],
)
def test_modules_of_the_standard_library_alone(module: str) -> None:
    assert not foreign(modules_after(f"import fuselora.{module}"))


def test_the_package_offers_its_names_lazily() -> None:
    modules = modules_after("import fuselora; fuselora.read_marker; fuselora.marker")
    assert not foreign(modules)
    assert not heavy(modules_after("import fuselora; fuselora.plan; fuselora.merge"))


def test_the_marker_command_needs_the_standard_library_alone(inputs: Path) -> None:
    fused(inputs)
    run = "runpy.run_module('fuselora.marker', run_name='__main__')"
    code = f"import runpy, sys; sys.argv = ['marker', 'out']; {run}"
    assert not foreign(modules_after(code, cwd=inputs))


def fused(inputs: Path) -> Path:
    import fuselora

    out = inputs / "out"
    if not out.exists():
        fuselora.merge(inputs / "base", [f"high={inputs / 'high.safetensors'}"], out)
    return out


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_planning_needs_no_torch_and_no_hub(inputs: Path, dtype: str) -> None:
    code = f"""
import fuselora.pipeline
plan = fuselora.pipeline.plan("base", ["high.safetensors,low.safetensors"], dtype={dtype!r})
assert plan.fingerprint is None
assert [component.n_fused for component in plan.components] == [10, 10]
"""
    assert not heavy(modules_after(code, cwd=inputs))


def command(*arguments: str) -> str:
    """Code that runs the command line."""
    return f"import sys; sys.argv = ['fuselora', *{arguments!r}]; from fuselora.cli import app; app()"


NEEDLESS = {"torch", "numpy", "safetensors", "diffusers", "transformers", "huggingface_hub"}


@pytest.mark.parametrize("arguments", [[], ["merge"], ["verify"]])
def test_help_needs_no_torch_no_hub_and_no_progress_bars(arguments: list[str]) -> None:
    modules = modules_after(command(*arguments, "--help"))
    assert not heavy(modules) & NEEDLESS
    assert not modules & {"rich.progress", "fuselora.report", "fuselora.pipeline"}


def test_the_plan_command_needs_no_torch_and_no_hub(inputs: Path) -> None:
    code = command("plan", "--base", "base", "--lora", "high.safetensors,low.safetensors")
    assert not heavy(modules_after(code, cwd=inputs)) & NEEDLESS
    assert not (inputs / "base-fused").exists()


def test_the_check_command_needs_no_torch_and_no_hub(inputs: Path) -> None:
    fused(inputs)
    assert not heavy(modules_after(command("check", "out"), cwd=inputs)) & NEEDLESS
