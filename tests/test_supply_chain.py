"""What is installed is declared, and nothing that comes with a checkpoint or a LoRA is ever run."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fuselora import synth

ROOT = Path(__file__).resolve().parents[1]
SIZE = synth.tiny("wan2.2-t2v-a14b", blocks=1)
# Imported where they are installed, for what is about them.
OPTIONAL = {"transformers", "vllm", "vllm_omni"}
FORBIDDEN_MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "subprocess", "code",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {"torch.load", "os.system", "os.popen", "torch.hub", "numpy.load"}
FORBIDDEN_OPTIONS = {"trust_remote_code", "allow_pickle"}
# Our own modules, vLLM-Omni's loader, diffusers or transformers.
CODE = ("__init__.py", "pipeline.py", "modeling_wan.py", "setup.py", "conftest.py", "sitecustomize.py")
BY_NAME = {"__init__.py", "marker.py", "serving/vllm_omni.py", "loading.py"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / "fuselora").rglob("*.py")):
        yield path.relative_to(ROOT / "fuselora").as_posix(), ast.parse(path.read_text("utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def forbidden(tree: ast.Module) -> Iterator[str]:
    yield from FORBIDDEN_MODULES & set(imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_METHODS:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            yield from FORBIDDEN_CALLS & {ast.unparse(node.func)}
            yield from FORBIDDEN_OPTIONS & {word.arg for word in node.keywords if word.arg}


def declared() -> dict[str, Requirement]:
    found = (Requirement(text) for text in requires("fuselora") or ())
    return {r.name.replace("-", "_"): r for r in found if r.marker is None}


def test_nothing_in_the_package_can_run_data() -> None:
    assert {name: list(forbidden(tree)) for name, tree in trees() if [*forbidden(tree)]} == {}
    everything = ast.parse("import pickle\neval('1')\ntorch.load(f, trust_remote_code=True)")
    assert {*forbidden(everything)} == {"pickle", "eval", "torch.load", "trust_remote_code"}


def test_modules_are_imported_by_name_in_few_places() -> None:
    assert {name for name, tree in trees() if "import_module" in ast.unparse(tree)} == BY_NAME


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    names = {name for _, tree in trees() for name in imported(tree)}
    foreign = names - set(sys.stdlib_module_names) - OPTIONAL - {"fuselora"}
    assert foreign == declared().keys()


def test_the_versions_of_vllm_omni_s_environment_are_in_range() -> None:
    pinned = (ROOT / "tests/vllm_omni/constraints.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", pinned, re.MULTILINE))
    shared = declared().keys() & pins.keys()
    assert shared >= {"torch", "diffusers", "safetensors", "huggingface_hub"}
    assert all(declared()[name].specifier.contains(Version(pins[name])) for name in shared)


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "fuselora", *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Made by whatever runs something of the base or the LoRA."""
    return tmp_path / "trapped"


@pytest.fixture
def base(tmp_path: Path, trap: Path) -> Path:
    """A pipeline with code, and pickles beside its weights, as remote code and old weights come."""
    base = synth.write_pipeline(tmp_path / "base", SIZE, experts=False, dtype="BF16")
    code = f"import os\nos.mkdir({str(trap)!r})\n"
    for folder in (base, base / "transformer"):
        for name in CODE:
            (folder / name).write_text(code)
    for config in (base / "model_index.json", base / "transformer" / "config.json"):
        document = json.loads(config.read_text())
        document |= {
            "auto_map": {"AutoModel": "modeling_wan.WanTransformer3DModel"},
            "trust_remote_code": True,
        }
        config.write_text(json.dumps(document))
    (base / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Payload(trap)))
    return base


def test_no_command_runs_what_comes_with_the_inputs(base: Path, trap: Path, tmp_path: Path) -> None:
    lora = synth.write_lora(tmp_path / "adapter" / "adapter_model.safetensors", SIZE, style="peft", rank=4)
    (lora.parent / "__init__.py").write_text(f"import os\nos.mkdir({str(trap)!r})\n")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "auto_mapping": {"parent_library": "pipeline"}}
    (lora.parent / "adapter_config.json").write_text(json.dumps(config))
    out, given = tmp_path / "out", ("--base", base, "--lora", lora.parent)
    for command in (
        ("plan", *given),
        ("inspect", base, lora.parent),
        ("merge", *given, "--out", out),
        ("check", out, "--lora", lora.parent),
        ("verify", out, *given, "--load"),
    ):
        done = run(*command, folder=base)
        assert done.returncode == (1 if command[0] == "check" else 0), (command, done.stderr)
        assert not trap.exists(), command


@pytest.mark.parametrize("command", ["merge", "plan", "inspect", "check", "verify"])
def test_a_pickle_is_never_opened(command: str, base: Path, trap: Path, tmp_path: Path) -> None:
    evil = tmp_path / "lora.safetensors"
    evil.write_bytes(pickle.dumps(Payload(trap)))
    given: dict[str, tuple[object, ...]] = {
        "inspect": (evil,),
        "check": (base, "--lora", evil),
        "verify": (base, "--base", base, "--lora", evil),
    }
    done = run(command, *given.get(command, ("--base", base, "--lora", evil)), folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not trap.exists()


def test_the_trap_snaps(trap: Path) -> None:
    """Or the tests above would show nothing."""
    pickle.loads(pickle.dumps(Payload(trap)))
    assert trap.is_dir()
