"""Several LoRAs of any kinds on one tensor are the float64 definitions' sum, within the bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fuselora
from fuselora.definitions import changed, difference, moves
from fuselora.exact import SLACK, compare
from fuselora.kinds.settings import Settings
from fuselora.lora.grammar import parse_key
from fuselora.verify import verify
from tests.adapters import CONV, LINEAR, MODULE, SAMPLES, Sample
from tests.properties.bounds import examples

ON_ONE = {
    shape: [
        s for s in SAMPLES if s.shape == shape and s.config is None and s.targets == (f"{MODULE}.weight",)
    ]
    for shape in (LINEAR, CONV)
}
STRENGTHS = st.sampled_from([1.0, 0.5, -1.0, 2.0, 0.0, 1 / 3, -0.125])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@dataclass(frozen=True)
class Given:
    """One LoRA: a sample of random values at a strength."""

    sample: Sample
    strength: float
    seed: int
    dtype: torch.dtype

    def parts(self) -> dict[str, torch.Tensor]:
        tensors = self.sample.tensors(self.seed, dtype=self.dtype)
        return {parsed.part: t.double() for name, t in tensors.items() if (parsed := parse_key(name))}


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Given, ...]:
    shape = draw(st.sampled_from([*ON_ONE]))
    one = st.builds(Given, st.sampled_from(ON_ONE[shape]), STRENGTHS, st.integers(0, 1 << 20), DTYPES)
    return tuple(draw(st.lists(one, min_size=1, max_size=4, unique_by=lambda given: given.seed)))


def total(base: torch.Tensor, loras: Sequence[Given]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in float64 and the magnitudes in it."""
    weight = base.double()
    value, size = weight, weight.abs()
    for lora in loras:
        parts, strength = lora.parts(), lora.strength
        stored, rank = parts.pop("alpha", None), _rank(parts)
        alpha = None if stored is None else float(stored)
        ratio = float(parts.pop("alpha_scale", 1.0 if alpha is None else alpha / rank))
        if moves(lora.sample.kind, parts):
            settings = Settings(alpha=alpha, on_input=bool(parts.pop("on_input", 0)))
            new = changed(lora.sample.kind, parts, weight, ratio, settings)
            value = value + strength * (new.value - weight)
            size = size + abs(strength) * (new.size + weight.abs())
        else:
            added = difference(lora.sample.kind, parts, weight)
            value, size = value + strength * ratio * added.value, size + abs(strength * ratio) * added.size
    return value, size


def _rank(parts: dict[str, torch.Tensor]) -> int:
    """What alpha is divided by: of a sample the same in every factor that has one."""
    if "up_0" in parts:
        return parts["up_0"].shape[1]
    for part in ("down", "embedding_down", "hada_w1_b", "lokr_w2_b"):
        if part in parts:
            return len(parts[part])
    return min(parts["a1"].shape[:2]) if "a1" in parts else 1


Merged = Callable[[Sequence[Given], torch.Tensor, str], tuple[torch.Tensor, Path, Path, list[Path]]]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Merged:
    root, count = tmp_path_factory.mktemp("mixtures"), iter(range(1_000_000))

    def merge(
        loras: Sequence[Given], weight: torch.Tensor, kernel: str
    ) -> tuple[torch.Tensor, Path, Path, list[Path]]:
        folder, key = root / str(next(count)), loras[0].sample.target
        folder.mkdir()
        base, out = folder / "base.safetensors", folder / "out"
        save_file({key: weight}, base)
        files = [
            lora.sample.write(folder / str(n), lora.sample.tensors(lora.seed, dtype=lora.dtype))
            for n, lora in enumerate(loras)
        ]
        specs = [f"{file}:{lora.strength!r}" for file, lora in zip(files, loras, strict=True)]
        fuselora.merge(base=base, loras=specs, out=out, kernel=kernel, digest=False)
        return load_file(out / base.name)[key], base, out, files

    return merge


@examples(80)
@given(
    loras=mixtures(),
    dtype=DTYPES,
    kernel=st.sampled_from(["auto", "reference"]),
    seed=st.integers(0, 1 << 20),
)
def test_any_mixture_is_within_the_bar(
    loras: tuple[Given, ...], dtype: torch.dtype, kernel: str, seed: int, merged: Merged
) -> None:
    weight = loras[0].sample.base(seed, dtype)
    found, *_ = merged(loras, weight, kernel)
    value, size = total(weight, loras)
    distance = compare(found, value, SLACK * size)
    assert (distance.elements, distance.beyond, distance.unexplained) == (weight.numel(), 0, 0)


@examples(25)
@given(loras=mixtures(), dtype=DTYPES)
def test_any_mixture_is_verified(loras: tuple[Given, ...], dtype: torch.dtype, merged: Merged) -> None:
    _, base, out, files = merged(loras, loras[0].sample.base(1, dtype), "auto")
    assert verify(out, base=base, loras=files).findings == ()
