"""The engine shards a fused folder with FSDP2 (HSDP): plain parameters, no LoRA, the values on disk."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

from fuselora import merge
from fuselora.synth import write_lora
from tests.oracle.definition import weights
from tests.vllm_omni import engine
from tests.vllm_omni.bases import SHARD_BYTES, WAN, write_wan
from tests.vllm_omni.names import in_checkpoint_names
from tests.vllm_omni.ranks import Ranks

EXPERTS = ("transformer", "transformer_2")
FUSED = "blocks.0.attn1.to_q.weight"


@dataclass(frozen=True)
class Folders:
    base: Path
    loras: tuple[Path, ...]
    out: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("hsdp")
    base = write_wan(folder / "base", experts=True, shard_bytes=SHARD_BYTES)
    loras = tuple(
        write_lora(folder / f"{name}_noise.safetensors", WAN, rank=8, alpha=4, seed=seed)
        for seed, name in enumerate(("high", "low"), start=2)
    )
    return Folders(base, loras, merge(base, [",".join(map(str, loras))], folder / "out").out)


@dataclass(frozen=True)
class Sharded:
    """What one process holds of both experts: kinds of parameters, elements of its own and of all."""

    kinds: tuple[str, ...]
    n_parameters: int
    n_local: int
    n_whole: int
    read: bool
    lora: tuple[str, ...]


def shard(folder: Path, gathered: Path, options: dict[str, Any]) -> Sharded:
    """Load a folder with HSDP on; rank 0 writes the gathered experts into ``gathered``."""
    own = engine.loader(folder, hsdp=True, **options)
    pipeline = engine.load_with(own)
    for component in EXPERTS:
        held = in_checkpoint_names(engine.weights(pipeline, component))
        if torch.distributed.get_rank() == 0:
            save_file({name: value.contiguous() for name, value in held.items()}, gathered / component)
    parameters = [value for component in EXPERTS for value in getattr(pipeline, component).parameters()]
    return Sharded(
        kinds=tuple(sorted({type(value).__name__ for value in parameters})),
        n_parameters=len(parameters),
        n_local=sum(value.to_local().numel() for value in parameters if isinstance(value, DTensor)),
        n_whole=sum(value.numel() for value in parameters),
        read=own.counter_before_loading_weights > 0,
        lora=tuple(traces_of_lora(pipeline)),
    )


def traces_of_lora(pipeline: Any) -> list[str]:
    """Everything about a loaded pipeline that says LoRA."""
    found = [f"module {name}" for name, m in pipeline.named_modules() if "lora" in type(m).__name__.lower()]
    found += [f"parameter {name}" for name, _ in pipeline.named_parameters() if "lora" in name.lower()]
    found += ["a manager" for thing in gc.get_objects() if type(thing) is DiffusionLoRAManager]
    found += ["fused here"] * pipeline.lora_is_fused
    return found + ["kept for unloading"] * bool(pipeline.lora_loaded)


def assert_gathered(gathered: Path, out: Path) -> None:
    for component in EXPERTS:
        held, stored = load_file(gathered / component), weights(out / component)
        assert held.keys() == stored.keys()
        for name, value in held.items():
            assert torch.equal(value, stored[name].bfloat16()), name


def assert_served_without_lora(found: list[Sharded]) -> None:
    for rank in found:
        assert rank.kinds == ("DTensor",)
        assert rank.n_parameters == 2 * 61
        assert rank.lora == ()
    assert sum(rank.n_local for rank in found) == found[0].n_whole


def test_one_process(folders: Folders, tmp_path: Path) -> None:
    found = [shard(folders.out, tmp_path, {})]
    assert_served_without_lora(found)
    assert_gathered(tmp_path, folders.out)


def test_two_processes(folders: Folders, two: Ranks, tmp_path: Path) -> None:
    found = two.run(shard, folders.out, tmp_path, {"world_size": 2})
    assert_served_without_lora(found)
    assert all(rank.read for rank in found)
    assert all(0.4 < rank.n_local / rank.n_whole < 0.6 for rank in found)
    assert_gathered(tmp_path, folders.out)


def test_one_process_reads_and_the_other_is_sent(folders: Folders, two: Ranks, tmp_path: Path) -> None:
    options = {"world_size": 2, "enable_broadcast_weight_load": True}
    found = two.run(shard, folders.out, tmp_path, options)
    assert_served_without_lora(found)
    assert [rank.read for rank in found] == [True, False]
    assert_gathered(tmp_path, folders.out)


def test_a_float32_base_fused_to_bfloat16(folders: Folders, tmp_path: Path) -> None:
    """Norms and tables stay in float32 on disk, as the model class wants them; FSDP2 gets one dtype."""
    base = write_wan(tmp_path / "base", experts=True, dtype="F32")
    loras = [",".join(map(str, folders.loras))]
    out = merge(base, loras, tmp_path / "out", dtype="bfloat16").out
    assert {value.dtype for value in weights(out / "transformer").values()} == {torch.bfloat16, torch.float32}
    assert_served_without_lora([shard(out, tmp_path, {})])
    assert_gathered(tmp_path, out)


# The same numbers


def sharded_forward(folder: Path) -> list[Any]:
    return [engine.forward(folder, name, hsdp=True, world_size=2).tolist() for name in EXPERTS]


def test_a_sharded_forward_pass_is_the_unsharded_one(folders: Folders, two: Ranks) -> None:
    wanted = [engine.forward(folders.out, name) for name in EXPERTS]
    assert not torch.allclose(wanted[0], wanted[1], atol=0.1)
    for found in (
        [engine.forward(folders.out, name, hsdp=True) for name in EXPERTS],
        *(map(torch.tensor, rank) for rank in two.run(sharded_forward, folders.out)),
    ):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# What it replaces


def test_the_engine_cannot_fuse_into_sharded_parameters(folders: Folders) -> None:
    """The fault that a fused folder has no room for: vLLM-Omni issue 6944."""
    pipeline = engine.load(folders.base, hsdp=True)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        pipeline.load_lora_weights([str(path) for path in folders.loras])


def test_fusing_before_sharding_leaves_lora_behind(folders: Folders, two: Ranks, tmp_path: Path) -> None:
    """What the engine does since: every process fuses, and keeps the LoRA for as long as it runs."""
    loras = {"loras": folders.loras, "world_size": 2}
    found = two.run(shard, folders.base, tmp_path, loras)
    assert [rank.lora for rank in found] == [("fused here", "kept for unloading")] * 2
    assert [rank.read for rank in found] == [True, True]
    before, after = weights(folders.base / "transformer"), load_file(tmp_path / "transformer")
    assert not torch.equal(after[FUSED], before[FUSED].bfloat16())
