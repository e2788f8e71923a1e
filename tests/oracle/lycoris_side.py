"""What LyCORIS and PEFT make of a layer: what they save, and the weight that they compute with.

The weight is the one of their forward pass, in float64. LyCORIS 4.1.3 multiplies LoHa and LoKr by
alpha / rank twice when it merges (``get_weight`` has the scale, and ``get_diff_weight`` takes it times the
scale again), once when it runs and trains: the latter is FedPara's and LoKr's published definition, and what
every other reader of these files computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lycoris.modules.glora import GLoRAModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from peft import LoHaConfig, LoKrConfig, get_peft_model
from torch import nn

from tests.cases.builders import save
from tests.oracle.merges import Tensors, fused

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
NAME = "blocks.0.attn1.to_q"
FLAT = f"lora_unet_{NAME.replace('.', '_')}"

LAYERS: Mapping[str, Callable[[], Layer]] = {
    "linear": lambda: nn.Linear(24, 160, bias=False),
    "conv1d": lambda: nn.Conv1d(12, 160, 3, bias=False),
    "conv2d": lambda: nn.Conv2d(12, 160, (3, 2), bias=False),
    "conv3d": lambda: nn.Conv3d(12, 160, (2, 3, 2), bias=False),
    "conv1x1": lambda: nn.Conv2d(24, 160, 1, bias=False),
}
MODULES: Mapping[str, type] = {"loha": LohaModule, "lokr": LokrModule, "glora": GLoRAModule}


@dataclass(frozen=True)
class Trained:
    """An adapter on one layer: its file's tensors without the module's name, and the weights in float64."""

    saved: Tensors
    weight: torch.Tensor
    changed: torch.Tensor
    output: Callable[[torch.Tensor], torch.Tensor]


def lycoris(kind: str, layer: Layer, scalar: float | None = None, **options: Any) -> Trained:
    """A module of LyCORIS' with random parameters; ``scalar`` is what its use_scalar has learned."""
    module = MODULES[kind]("x", layer, use_scalar=scalar is not None, **options)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter) if name != "scalar" else nn.init.constant_(parameter, scalar or 0.0)
    saved = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    module.eval().double()
    weight = layer.double().weight.detach()
    delta = module.make_weight() if kind == "glora" else module.get_weight(weight.shape) * module.scalar
    return Trained(saved, weight, (weight + delta).detach(), module)


def merged(folder: Path, trained: Trained, **options: Any) -> torch.Tensor:
    """What fuselora makes of what was saved, under kohya's name for the layer; options as of ``fused``."""
    lora = save(folder / "x.safetensors", {f"{FLAT}.{part}": t for part, t in trained.saved.items()})
    return fused(folder, {f"{NAME}.weight": trained.weight}, lora, **options)[f"{NAME}.weight"]


class Model(nn.Module):
    """A layer that has a name."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.to_q = layer


def peft(folder: Path, layer: Layer, config: LoHaConfig | LoKrConfig) -> Trained:
    """An adapter of PEFT's with random parameters, which PEFT itself saves into ``folder``."""
    torch.manual_seed(1)
    weight = layer.weight.detach().double()
    model = get_peft_model(Model(layer), config)
    for name, parameter in model.named_parameters():
        if "hada_" in name or "lokr_" in name:
            nn.init.normal_(parameter)
    model.save_pretrained(str(folder))
    wrapped: Any = model.double().eval().get_submodule("base_model.model.to_q")
    return Trained({}, weight, weight + wrapped.get_delta_weight("default").detach(), wrapped)
