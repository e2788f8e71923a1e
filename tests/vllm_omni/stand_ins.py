"""What vLLM-Omni asks for and a CPU does not have: torchvision's modules, an accelerator's platform."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

TORCHVISION = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
    "torchvision.io",
)
LOOK_FOR_TORCHVISION = ("torch", "transformers", "diffusers")


def stand_in_for_torchvision() -> None:
    """Empty modules of its names: the engine's Wan and Qwen-Image modules import it, nothing here calls it.

    The libraries that use torchvision when there is one look for it before: they are to find none.
    """
    for library in LOOK_FOR_TORCHVISION:
        importlib.import_module(library)
    for name in TORCHVISION:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module


def stand_in_for_an_accelerator() -> None:
    """The platform of an unknown device counts one of them, and torch's own function computes attention."""
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
    from vllm_omni.platforms.interface import UnspecifiedOmniPlatform as Platform

    Platform.get_device_count = classmethod(lambda cls: 1)
    Platform.set_device = classmethod(lambda cls, device: None)
    Platform.synchronize = classmethod(lambda cls: None)
    Platform.get_diffusion_attn_backend_cls = classmethod(
        lambda cls, *_, **__: DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()
    )
    SDPAImpl.forward = SDPAImpl.forward_cuda
