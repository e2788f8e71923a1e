"""The engine's loader reads a fused folder: these files, these tensors, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from vllm.model_executor.model_loader import weight_utils

from fuselora import merge
from fuselora.synth import WanSize, tiny, write_lora, write_native
from tests.oracle.definition import Tensors, weights
from tests.small import noise
from tests.vllm_omni import engine
from tests.vllm_omni.bases import QWEN_LINEARS, SHARD_BYTES, WAN, write_qwen, write_wan
from tests.vllm_omni.names import in_checkpoint_names

INDEX = "diffusion_pytorch_model.safetensors.index.json"
MODEL_CLASS: Any = WanTransformer3DModel
FUSED = "blocks.0.attn1.to_q.weight"
I2V = tiny("wan2.2-i2v-a14b")


@dataclass(frozen=True)
class Case:
    """A base as it is written, and a merge as it is asked for."""

    size: WanSize = WAN
    written: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    n_shards: int = 1


TWO: dict[str, Any] = {"experts": True, "shard_bytes": SHARD_BYTES}
CASES = {
    "two experts in shards": Case(written=TWO, n_shards=4),
    "two experts in one file each": Case(written={"experts": True}),
    "one transformer": Case(written={"shard_bytes": SHARD_BYTES}, n_shards=4),
    "float32 base": Case(written=TWO | {"dtype": "F32"}, asked={"dtype": "bfloat16"}, n_shards=7),
    "image to video": Case(I2V, written=TWO, n_shards=4),
}


@dataclass(frozen=True)
class Fused:
    case: Case
    base: Path
    out: Path

    @property
    def components(self) -> tuple[str, ...]:
        return ("transformer", "transformer_2") if self.case.written.get("experts") else ("transformer",)

    def files(self, component: str) -> set[str]:
        """The weight files that the component's index names, or its one file."""
        index = self.out / component / INDEX
        if not index.exists():
            return {"diffusion_pytorch_model.safetensors"}
        return set(json.loads(index.read_text())["weight_map"].values())


def write_fused(folder: Path, case: Case) -> Fused:
    base = write_wan(folder / "base", case.size, **case.written)
    fused = Fused(case, base, folder / "out")
    loras = [
        f"{component}={write_lora(folder / f'{component}.safetensors', case.size, rank=8, seed=seed)}"
        for seed, component in enumerate(fused.components, start=2)
    ]
    merge(base, loras, fused.out, **case.asked)
    return fused


@pytest.fixture(scope="module", params=CASES)
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fused:
    return write_fused(tmp_path_factory.mktemp("fused"), CASES[request.param])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """The weight files that the engine reads, however it does."""
    found: Counter[Path] = Counter()

    def watched(own: Any) -> Any:
        def call(path: str, *args: Any, **options: Any) -> Any:
            found[Path(path)] += 1
            return own(path, *args, **options)

        return call

    for name in ("load_file", "safe_open"):
        monkeypatch.setattr(weight_utils, name, watched(getattr(weight_utils, name)))
    return found


def test_the_folder_holds_nothing_that_could_be_misread(fused: Fused) -> None:
    assert (fused.out / "fused.json").is_file()
    for component in fused.components:
        files = fused.files(component)
        assert len(files) == fused.case.n_shards
        index = {INDEX} if len(files) > 1 else set()
        assert {path.name for path in (fused.out / component).iterdir()} == files | index | {"config.json"}


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "one by one"])
def test_only_the_files_of_the_index_are_read(fused: Fused, read: Counter[Path], threads: bool) -> None:
    pipeline = engine.load(fused.out, enable_multithread_weight_load=threads)
    assert [source.prefix for source in pipeline.weights_sources] == [f"{c}." for c in fused.components]
    wanted = {
        fused.out / component / name for component in fused.components for name in fused.files(component)
    }
    assert read == Counter(dict.fromkeys(wanted, 1))


def test_each_tensor_of_the_index_comes_once_and_no_other(fused: Fused) -> None:
    own = engine.loader(fused.out)
    names = Counter(name for name, _ in own.get_all_weights(engine.load_with(own)))
    wanted = {f"{c}.{name}" for c in fused.components for name in weights(fused.out / c)}
    assert names == Counter(dict.fromkeys(wanted, 1))


def test_every_parameter_is_what_the_folder_holds(fused: Fused) -> None:
    pipeline = engine.load(fused.out)
    assert {name.partition(".")[0] for name, _ in pipeline.named_parameters()} >= set(fused.components)
    for component in fused.components:
        held = in_checkpoint_names(engine.weights(pipeline, component))
        assert_same(held, weights(fused.out / component))
        assert not torch.equal(held[FUSED], weights(fused.base / component)[FUSED].bfloat16())


def test_a_file_beside_the_shards_is_read_only_without_an_index(fused: Fused, tmp_path: Path) -> None:
    """Why fuselora leaves nothing else in the folder: of two values of a tensor either could win."""
    copy = Path(shutil.copytree(fused.out, tmp_path / "copy"))
    save_file({FUSED: torch.zeros(48, 48)}, copy / "transformer" / "stray.safetensors")
    own = engine.loader(copy)
    names = Counter(name for name, _ in own.get_all_weights(engine.load_with(own)))
    has_index = (copy / "transformer" / INDEX).exists()
    assert names[f"transformer.{FUSED}"] == (1 if has_index else 2)


def assert_same(held: Tensors, stored: Tensors) -> None:
    """The engine holds every tensor of a checkpoint in bfloat16."""
    assert held.keys() == stored.keys()
    for name, tensor in held.items():
        assert tensor.dtype == torch.bfloat16, name
        assert torch.equal(tensor, stored[name].bfloat16()), name


def test_qwen_image(tmp_path: Path) -> None:
    """A family that fuselora has no data for: the names agree, q, k and v are stacked by the engine."""
    base = write_qwen(tmp_path / "base")
    lora = {}
    for name, (out_dim, in_dim) in QWEN_LINEARS.items():
        lora[f"transformer.{name}.lora_A.weight"] = noise(4, in_dim, seed=1, std=0.2)
        lora[f"transformer.{name}.lora_B.weight"] = noise(out_dim, 4, seed=2, std=0.2)
    save_file(lora, tmp_path / "lora.safetensors")
    out = merge(base, [str(tmp_path / "lora.safetensors")], tmp_path / "out").out
    before, stored = weights(base / "transformer"), weights(out / "transformer")
    assert_same(in_checkpoint_names(engine.weights(engine.load(out), "transformer")), stored)
    changed = {name for name, tensor in stored.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{name}.weight" for name in QWEN_LINEARS}


def test_a_native_base_put_into_a_skeleton(tmp_path: Path) -> None:
    """Wan's own names on disk become the folder that the engine reads: the same as from diffusers' names."""
    written = {**TWO, "dtype": "BF16", "mixed": True}
    native = write_native(tmp_path / "native", I2V, **written)
    skeleton = write_wan(tmp_path / "skeleton", I2V, **written)
    files = [
        write_lora(tmp_path / f"{name}_noise.safetensors", I2V, rank=8, seed=seed)
        for seed, name in enumerate(("high", "low"))
    ]
    loras = [",".join(map(str, files))]
    out = merge(native, loras, tmp_path / "out", layout="diffusers", skeleton=skeleton).out
    other = merge(skeleton, loras, tmp_path / "other").out
    pipeline = engine.load(out)
    for component in ("transformer", "transformer_2"):
        held = in_checkpoint_names(engine.weights(pipeline, component))
        assert_same(held, weights(other / component))


def test_the_model_computes_what_diffusers_computes(tmp_path: Path) -> None:
    """A forward pass of each expert in float32, in the engine's model and in diffusers'."""
    fused = write_fused(tmp_path, Case(written=TWO | {"dtype": "F32"}))
    for component in fused.components:
        theirs = MODEL_CLASS.from_pretrained(fused.out / component)
        with torch.no_grad():
            wanted = theirs(**engine.wan_inputs())[0]
        assert wanted.std() > 0.1
        torch.testing.assert_close(engine.forward(fused.out, component), wanted, rtol=1e-4, atol=1e-5)
        assert (engine.forward(fused.base, component) - wanted).abs().max() > 0.01
