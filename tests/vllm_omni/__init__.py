"""Fused folders and LoRAs in vLLM-Omni's own classes, on the CPU: `make test-vllm-omni`."""

from importlib.util import find_spec

INSTALLED = find_spec("vllm_omni") is not None

if INSTALLED:
    from tests.vllm_omni.stand_ins import stand_in_for_torchvision

    stand_in_for_torchvision()
