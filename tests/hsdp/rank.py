"""What each rank does: load a fused folder as diffusers does, shard it, note what is there.

Nothing here knows of a LoRA, and neither PEFT nor fuselora can be imported. ``from_pretrained`` is
what widens a uniform folder again: diffusers holds some modules in float32 whatever is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from diffusers.utils import logging
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.hsdp.cases import CASES, EXPERTS, MESHES, RANKS, Case

MODEL_CLASS: Any = WanTransformer3DModel
BFLOAT16 = torch.bfloat16
FROM_STORED = MixedPrecisionPolicy()  # every parameter in its own dtype
WEIGHT = "blocks.0.attn1.to_q.weight"  # what the fault is shown on


def work(rank: int, size: int, folder: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    store = f"file://{folder}/store-{size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for mesh in MESHES:
        if mesh.size == size:
            devices = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
            for case in CASES:
                if case.mesh == mesh:
                    note(case, devices, rank, folder)
            note_dtypes(Case(mesh, "mixed", EXPERTS[0]), devices, rank, folder)
    dist.destroy_process_group()


def note(case: Case, devices: DeviceMesh, rank: int, folder: Path) -> None:
    """One expert before and after sharding, and what a LoRA added then would run into."""
    model = load(case, folder)
    held = {name: str(parameter.dtype) for name, parameter in model.named_parameters()}
    if case.kind == "uniform":
        model.to(BFLOAT16)
    else:
        model.requires_grad_(False)
    plain = output(model)
    sharded = output(shard(model, devices))
    model.reshard()  # FSDP leaves the root's own parameters gathered after a forward
    parameters: dict[str, Any] = dict(model.named_parameters())
    facts = about(model) | {"held": held, "files": weight_files(folder), "add": add_plain(parameters[WEIGHT])}
    case.notes(folder, rank).write(
        facts,
        local={name: parameter.to_local().detach().contiguous() for name, parameter in parameters.items()},
        full={name: parameter.full_tensor().detach() for name, parameter in parameters.items()},
        outputs={"plain": plain, "sharded": sharded},
    )


def note_dtypes(case: Case, devices: DeviceMesh, rank: int, folder: Path) -> None:
    """Two dtypes in one group of FSDP: to be trained, and cast to one for the time of a forward."""
    trained = shard(load(case, folder), devices)
    facts = {"trained": error_of(lambda: output(trained))}
    to_one = MixedPrecisionPolicy(param_dtype=BFLOAT16)
    cast = shard(load(case, folder).requires_grad_(False), devices, to_one)
    case.mesh.notes(folder, rank).write(facts, outputs={"cast": output(cast)})


def load(case: Case, folder: Path) -> Any:
    return MODEL_CLASS.from_pretrained(case.component(folder), torch_dtype=BFLOAT16)


def shard(model: Any, devices: DeviceMesh, policy: MixedPrecisionPolicy = FROM_STORED) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=devices, mp_policy=policy)
    return fully_shard(model, mesh=devices, mp_policy=policy)


@torch.no_grad()
def output(model: Any) -> torch.Tensor:
    """What the model makes of fixed noise."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator).to(BFLOAT16)

    found: torch.Tensor = model(
        hidden_states=noise(model.config.in_channels, 2, 4, 4),
        timestep=torch.tensor([500]),
        encoder_hidden_states=noise(8, model.config.text_dim),
        return_dict=False,
    )[0]
    return found.contiguous()


def about(model: Any) -> dict[str, object]:
    return {
        "parameters": {name: describe(parameter) for name, parameter in model.named_parameters()},
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": {name: type(module).__name__ for name, module in model.named_modules()},
        "adapters": [name for name in ("peft_config", "active_adapter") if name in vars(model)],
        "adapters loaded": model._hf_peft_config_loaded,
        "imported": sorted({name.split(".")[0] for name, module in sys.modules.items() if module}),
    }


def describe(parameter: Any) -> dict[str, object]:
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return {
        "class": type(parameter).__name__,
        "placements": [repr(placement) for placement in placements],
        "trainable": parameter.requires_grad,
    }


def weight_files(folder: Path) -> list[str]:
    """Every file of weights that a rank could have read."""
    found = (path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    return sorted(path.as_posix() for path in found if path.parts[0] != RANKS)


@torch.no_grad()
def add_plain(weight: Any) -> str:
    """What fusing at run time does once the weights are sharded."""
    return error_of(lambda: weight.add_(torch.ones(weight.shape, dtype=weight.dtype)))


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
