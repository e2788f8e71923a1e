"""One LoRA fused into one transformer by the engine as it starts, by us before, and in float64 by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fuselora import merge
from tests.oracle.definition import Tensors, weights
from tests.vllm_omni import engine, rounding
from tests.vllm_omni.names import in_checkpoint_names


@dataclass(frozen=True, repr=False)
class Comparison:
    """Tensors by the checkpoint's names: the base's, each delta in float64, and both results.

    ``dtype`` is that of the LoRA's factors. Assertions take the names that they are about.
    """

    before: Tensors
    deltas: Tensors
    dtype: torch.dtype
    ours: Tensors
    theirs: Tensors
    says_fused: bool

    @property
    def fused(self) -> set[str]:
        """What the engine changed."""
        return {n for n, tensor in self.before.items() if not torch.equal(tensor.bfloat16(), self.theirs[n])}

    def exact(self, name: str) -> torch.Tensor:
        return self.before[name].double() + self.deltas[name]

    def error(self, made: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """How far a result in bfloat16 lies from the exact one."""
        return (made[name].bfloat16().double() - self.exact(name)).abs()

    def assert_ours(self, names: Iterable[str] | None = None) -> None:
        """Ours are the exact sums rounded once, and show every delta; what no delta is for is the base's."""
        for name in self.deltas if names is None else names:
            assert (self.error(self.ours, name) <= rounding.once(self.exact(name))).all(), name
            assert not torch.equal(self.ours[name], self.before[name].to(self.ours[name].dtype)), name
        for name in self.before.keys() - self.deltas.keys():
            assert torch.equal(self.ours[name], self.before[name].to(self.ours[name].dtype)), name

    def assert_theirs(self, names: Iterable[str], strength: float = 1.0) -> None:
        """The engine's are the exact sums rounded twice; ``strength``: what it takes a delta times."""
        for name in names:
            before, delta = self.before[name], strength * self.deltas[name]
            error = (self.theirs[name].double() - before.double() - delta).abs()
            assert (error <= rounding.twice(before, delta, self.dtype)).all(), name


def compare(
    base: Path,
    lora: Path,
    out: Path,
    deltas: Tensors,
    *,
    strength: float = 1.0,
    dtype: str = "keep",
    **served: Any,
) -> Comparison:
    """Merge ``lora`` at ``strength`` into ``out``, and start the engine on ``base`` with it.

    Of a folder the engine gets adapter_model.safetensors. ``deltas`` are at strength 1; ``served`` are
    options of ``engine.config``.
    """
    file = lora / "adapter_model.safetensors" if lora.is_dir() else lora
    pipeline = engine.load(base, loras=(file,), **served)
    merge(base, [f"{lora}:{strength}"], out, dtype=dtype)
    meant = {name: strength * delta for name, delta in deltas.items()}
    return compared("transformer", base, out, pipeline, meant, file)


def compared(component: str, base: Path, out: Path, pipeline: Any, deltas: Tensors, lora: Path) -> Comparison:
    """One transformer of a base, of ours, and of a pipeline that fused while it loaded the base."""
    factors = (tensor for name, tensor in load_file(lora).items() if not name.endswith(".alpha"))
    return Comparison(
        before=weights(base / component),
        deltas=deltas,
        dtype=next(factors).dtype,
        ours=weights(out / component),
        theirs=in_checkpoint_names(engine.weights(pipeline, component)),
        says_fused=pipeline.lora_is_fused,
    )
