"""One process of vLLM-Omni on the CPU: its start, its configuration, its loader, what it then holds.

Everything is the engine's own: configuration, pipelines, loader, LoRA fusion and FSDP2 sharding.
``stand_ins`` says what it finds in place of an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.parallel_state import (
    destroy_distributed_env,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

from tests.small import noise
from tests.vllm_omni.bases import WAN
from tests.vllm_omni.stand_ins import stand_in_for_an_accelerator

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@contextmanager
def running(rank: int, world_size: int, meeting: Path) -> Iterator[None]:
    """One of ``world_size`` processes over gloo, which meet at the file ``meeting`` and may shard weights."""
    stand_in_for_an_accelerator()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(
            world_size=world_size,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"file://{meeting}",
            backend="gloo",
        )
        initialize_model_parallel(
            sequence_parallel_size=1, fully_shard_degree=world_size, use_hsdp=True, backend="gloo"
        )
        try:
            yield
        finally:
            destroy_distributed_env()


class QwenImageTransformerAlone(QwenImagePipeline):  # type: ignore[misc]
    """The engine's Qwen-Image pipeline with nothing in it but its transformer."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                od_config.model, "transformer", revision=None, prefix="transformer."
            )
        ]
        sizes = get_transformer_config_kwargs(od_config.tf_model_config, QwenImageTransformer2DModel)
        self.transformer = QwenImageTransformer2DModel(od_config=od_config, quant_config=None, **sizes)


def config(
    folder: Path,
    *,
    loras: tuple[Path, ...] = (),
    backend: Literal["peft", "distill"] = "distill",
    hsdp: bool = False,
    world_size: int = 1,
    **options: Any,
) -> OmniDiffusionConfig:
    """What `vllm serve FOLDER --omni` is configured with; ``loras`` are its --lora-path, none if empty.

    ``options`` are other fields of the engine's configuration.
    """
    parallel = DiffusionParallelConfig(use_hsdp=hsdp, hsdp_shard_size=world_size if hsdp else -1)
    if loras:
        options |= {"lora_backend": backend, "lora_path": [str(path) for path in loras]}
    made = OmniDiffusionConfig(model=str(folder), parallel_config=parallel, **options)
    made.enrich_config()
    return made


def loader(folder: Path, **options: Any) -> DiffusersPipelineLoader:
    """The engine's loader for a folder; ``options`` as in ``config``."""
    return DiffusersPipelineLoader(LoadConfig(use_tqdm_on_load=False), config(folder, **options))


def load(folder: Path, **options: Any) -> Any:
    """The pipeline as a worker of the engine loads it; ``options`` as in ``config``."""
    return load_with(loader(folder, **options))


def load_with(own: DiffusersPipelineLoader) -> Any:
    """``load_model`` as a worker calls it."""
    if own.od_config.model_class_name == "QwenImagePipeline":
        alone = {"load_format": "custom_pipeline", "custom_pipeline_name": QwenImageTransformerAlone}
        return own.load_model(load_device="cpu", device=CPU, **alone)
    return own.load_model(load_device="cpu", device=CPU)


def wan_inputs() -> dict[str, Any]:
    """Seeded inputs of a forward pass of the tiny text-to-video transformer, in float32."""
    return {
        "hidden_states": noise(1, WAN.in_channels, 1, 4, 4, seed=1),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": noise(1, 5, WAN.text_dim, seed=2),
        "return_dict": False,
    }


def forward(folder: Path, component: str, **options: Any) -> torch.Tensor:
    """What a transformer of the folder makes of ``wan_inputs`` in float32; ``options`` as in ``config``."""
    own = loader(folder, dtype=torch.float32, **options)
    transformer = getattr(load_with(own), component)
    with torch.no_grad(), set_forward_context(vllm_config=None, omni_diffusion_config=own.od_config):
        made: torch.Tensor = transformer(**wan_inputs())[0]
    return made


def weights(pipeline: Any, component: str) -> Tensors:
    """A transformer's parameters by the engine's names, gathered if they are sharded."""
    return {name: whole(value) for name, value in getattr(pipeline, component).named_parameters()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter, gathered from all processes if it is sharded."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()
