"""LoRAs and bases of a few tensors each, written to disk and opened as a merge opens them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fuselora.checkpoint import Checkpoint, Component, open_checkpoint
from fuselora.lora.adapter import Adapter, open_adapter
from fuselora.match import Matching, match
from fuselora.resolve import LoraLocation
from fuselora.specs import LoraSpec
from fuselora.synth import Spec, write_safetensors
from fuselora.targets import Assignment, modules_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PLAIN = "lora_down", "lora_up"
PEFT = "lora_A", "lora_B"


def tensor(name: str, *shape: int, value: float = 1.0, dtype: str = "F32") -> Spec:
    """A tensor of one value."""
    return Spec(name, dtype, shape, mean=value)


def pair(
    module: str,
    out: int = 4,
    into: int = 4,
    *,
    rank: int = 2,
    value: float = 1.0,
    style: tuple[str, str] = PLAIN,
    dtype: str = "F32",
    alpha: float | None = None,
) -> list[Spec]:
    """up @ down is ``value`` everywhere; alpha is stored when it is given."""
    down, up = style
    found = [
        tensor(f"{module}.{down}.weight", rank, into, dtype=dtype),
        tensor(f"{module}.{up}.weight", out, rank, value=value / rank, dtype=dtype),
    ]
    return found if alpha is None else [*found, tensor(f"{module}.alpha", value=alpha, dtype=dtype)]


def open_lora(
    path: Path,
    specs: Sequence[Spec],
    *,
    spec: LoraSpec | None = None,
    metadata: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Adapter:
    """The tensors as a LoRA at ``path``, given as ``spec``; by default untargeted, at strength 1."""
    write_safetensors(path, specs, metadata=metadata)
    return open_adapter(LoraLocation(spec or LoraSpec(str(path)), path, path.name, config))


def shard_name(number: int, total: int, stem: str = "adapter_model") -> str:
    return f"{stem}-{number:05}-of-{total:05}.safetensors"


def sharded(
    folder: Path,
    *shards: Sequence[Spec],
    metadata: Sequence[Mapping[str, str]] = (),
    stem: str = "adapter_model",
) -> Path:
    """The index of a LoRA whose tensors are spread over several files."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, 1):
        name = shard_name(number, len(shards), stem)
        write_safetensors(folder / name, specs, metadata=metadata[number - 1] if metadata else None)
        weight_map |= {spec.name: name for spec in specs}
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return index


def open_base(root: Path, *, variant: str | None = None) -> Checkpoint:
    return open_checkpoint(root, source=root.name, revision=None, variant=variant)


def one_component(path: Path, specs: Sequence[Spec]) -> tuple[Checkpoint, Component]:
    """A base that is one file."""
    base = open_base(write_safetensors(path, specs))
    return base, base.components[0]


def two_experts(folder: Path, specs: Sequence[Spec]) -> Checkpoint:
    """A pipeline whose two experts hold the same tensors."""
    for component in ("transformer", "transformer_2"):
        write_safetensors(folder / component / "diffusion_pytorch_model.safetensors", specs)
    return open_base(folder)


def matched(adapter: Adapter, base: Checkpoint, component: Component | None = None) -> Matching:
    component = component or base.components[0]
    assignment = Assignment(0, adapter, component, modules_for(adapter, component, base))
    return match(assignment, base.family, base.layout)
