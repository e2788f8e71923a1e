"""Fused folders in diffusers' model classes: every key finds its place, and the model computes the same.

The reference is the base in float32 plus the delta in float64, rounded once by hand to what the
folder stores, and put into the class directly. With the reference kernel nothing may differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from fuselora import merge
from fuselora.synth import VACE_CHANNELS, WanSize, tiny, write_file, write_lora, write_pipeline
from tests.oracle import definition
from tests.oracle.definition import Tensors, in_diffusers_names, weights
from tests.oracle.diffusers_side import quiet

SHARD_BYTES = 100_000
# (bits of the significand, exponent of the smallest number)
PRECISION = {torch.bfloat16: (8, -133), torch.float16: (11, -24), torch.float32: (24, -149)}
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Case:
    """A base as it is written, a merge as it is asked for, and the dtype it is loaded in."""

    base: str
    loaded: torch.dtype
    written: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def components(self) -> tuple[str, ...]:
        return ("transformer", "transformer_2") if self.written.get("experts") else ("transformer",)

    @property
    def variant(self) -> str | None:
        variant: str | None = self.written.get("variant")
        return variant


TO_BFLOAT16 = {"dtype": "bfloat16"}
UNIFORM = {"dtype": "bfloat16", "uniform": True}
FP16 = {"dtype": "F16", "variant": "fp16"}
CASES = {
    "float32 experts": Case("wan2.2-t2v-a14b", FLOAT32, {"experts": True}),
    "float32 shards": Case("wan2.2-t2v-a14b", FLOAT32, {"experts": True, "shard_bytes": SHARD_BYTES}),
    "bfloat16 experts": Case("wan2.2-t2v-a14b", BFLOAT16, {"experts": True}, TO_BFLOAT16),
    "bfloat16 shards": Case("wan2.2-i2v-a14b", BFLOAT16, {"shard_bytes": SHARD_BYTES}, TO_BFLOAT16),
    "uniform bfloat16 experts": Case("wan2.2-t2v-a14b", BFLOAT16, {"experts": True}, UNIFORM),
    "uniform bfloat16 shards": Case("wan2.2-i2v-a14b", BFLOAT16, {"shard_bytes": SHARD_BYTES}, UNIFORM),
    "mixed base": Case("wan2.2-ti2v-5b", BFLOAT16, {"dtype": "BF16", "mixed": True}),
    "bfloat16 base": Case("wan2.2-ti2v-5b", BFLOAT16, {"dtype": "BF16"}),
    "float16": Case("wan2.1-t2v-14b", FLOAT16, {}, {"dtype": "float16"}),
    "variant fp16": Case("wan2.2-t2v-a14b", FLOAT16, {"experts": True, **FP16}, {"variant": "fp16"}),
    "variant fp16 shards": Case(
        "wan2.1-t2v-14b", FLOAT16, {"shard_bytes": SHARD_BYTES, **FP16}, {"variant": "fp16"}
    ),
    "image branch": Case("wan2.1-i2v-14b", BFLOAT16, {}, TO_BFLOAT16),
    "VACE": Case("wan2.1-vace-14b", BFLOAT16, {}, TO_BFLOAT16),
    "float32 VACE": Case("wan2.1-vace-14b", FLOAT32, {"shard_bytes": SHARD_BYTES}),
}


@dataclass(frozen=True, repr=False)
class Fused:
    """A case on disk: the base, and what each kernel made of it with one LoRA per component."""

    case: Case
    base: Path
    loras: tuple[Path, ...]
    by_default: Path
    by_reference: Path

    @property
    def size(self) -> WanSize:
        return tiny(self.case.base)

    @property
    def by_kernel(self) -> Mapping[str, Path]:
        return {"default": self.by_default, "reference": self.by_reference}

    def stored_dtype(self, name: str, before: torch.dtype) -> torch.dtype:
        """The dtype that the folder holds a tensor in."""
        asked = self.case.asked.get("dtype")
        if asked is None:
            return before
        return FLOAT32 if kept(name) and not self.case.asked.get("uniform") else getattr(torch, asked)

    def loaded_dtype(self, name: str) -> torch.dtype:
        return FLOAT32 if kept(name) else self.case.loaded

    def load(self, folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
        """A component's model, and what the class says of its keys."""
        with quiet():
            model, info = model_class(self.size).from_pretrained(
                folder, torch_dtype=dtype, variant=self.case.variant, output_loading_info=True
            )
        return model, info

    def reference(self, number: int, dtype: torch.dtype | None = None) -> Any:
        """The model of component ``number``: in ``dtype`` throughout, or as the folder is to hold it."""
        folder = self.base / self.case.components[number]
        model, _ = self.load(folder, dtype or self.case.loaded)
        state: Tensors = {}
        for name, exact in exact_sums(folder, self.loras[number]).items():
            tensor, before = exact
            stored = dtype or self.stored_dtype(name, before)
            state[name] = rounded_once(tensor, stored).to(dtype or self.loaded_dtype(name))
        assert {n: t.dtype for n, t in state.items()} == {n: t.dtype for n, t in model.state_dict().items()}
        model.load_state_dict(state)
        return model


@pytest.fixture(scope="module", params=CASES)
def fused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fused:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("case")
    size = tiny(case.base)
    base = write_pipeline(folder / "base", size, **case.written)
    # every tensor of the base gets a delta, and each expert another one
    loras = tuple(
        write_lora(folder / f"lora_{number}.safetensors", size, style="extractor", seed=number)
        for number in range(len(case.components))
    )
    specs = [",".join(map(str, loras))]
    return Fused(
        case,
        base,
        loras,
        merge(base, specs, folder / "default", **case.asked).out,
        merge(base, specs, folder / "reference", kernel="reference", **case.asked).out,
    )


def model_class(size: WanSize) -> Any:
    return diffusers.WanVACETransformer3DModel if size.vace_blocks else diffusers.WanTransformer3DModel


def kept(name: str) -> bool:
    """Whether the class keeps this tensor in float32, whatever it is loaded in."""
    listed: list[str] = model_class(tiny("wan2.1-vace-14b"))._keep_in_fp32_modules
    return not set(listed).isdisjoint(name.split("."))


def exact_sums(folder: Path, lora: Path) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    """Base plus delta in float64, and the base's own dtype."""
    deltas = in_diffusers_names(definition.deltas(load_file(lora), None, ()))
    before = weights(folder)
    assert deltas.keys() == before.keys()
    return {name: (weight.double() + deltas[name], weight.dtype) for name, weight in before.items()}


def rounded_once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest value of ``dtype``, ties to even; torch itself goes through float32 and so rounds twice."""
    bits, lowest = PRECISION[dtype]
    _, exponent = torch.frexp(exact)
    unit = torch.pow(2.0, (exponent.double() - bits).clamp(min=lowest))
    return (torch.round(exact / unit) * unit).to(dtype)


@torch.no_grad()
def output(model: Any, size: WanSize) -> torch.Tensor:
    """What the model makes of fixed noise, in float64."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator).to(model.dtype)

    inputs = {
        "hidden_states": noise(size.in_channels, 2, 4, 4),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(512, size.text_dim),  # the image branch counts on 512
    }
    if size.image_dim:
        inputs["encoder_hidden_states_image"] = noise(5, size.image_dim)
    if size.vace_blocks:
        inputs["control_hidden_states"] = noise(VACE_CHANNELS, 2, 4, 4)
    found: torch.Tensor = model(**inputs, return_dict=False)[0]
    return found.double()


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_the_folder_is_as_the_case_says(fused: Fused) -> None:
    for component in fused.case.components:
        names = [path.name for path in (fused.by_default / component).iterdir()]
        sharded = "shard_bytes" in fused.case.written
        assert (sum(".index." in name for name in names), len(names) > 3) == (sharded, sharded)
        assert all((".fp16" in name) == bool(fused.case.variant) for name in names if name != "config.json")


@pytest.mark.parametrize("kernel", ["default", "reference"])
def test_every_key_finds_its_place(fused: Fused, kernel: str) -> None:
    for component in fused.case.components:
        folder = fused.by_kernel[kernel] / component
        model, info = fused.load(folder, fused.case.loaded)
        assert info.keys() == {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"}
        assert not any(info.values()), info
        state, stored, before = model.state_dict(), weights(folder), weights(fused.base / component)
        assert state.keys() == stored.keys() == before.keys()
        for name, tensor in stored.items():
            assert tensor.dtype == fused.stored_dtype(name, before[name].dtype), name
            assert state[name].dtype == fused.loaded_dtype(name), name
            assert torch.equal(state[name], tensor.to(state[name].dtype)), name
            assert not torch.equal(tensor, before[name]), name


def test_the_reference_kernel_gives_the_reference(fused: Fused) -> None:
    for number, component in enumerate(fused.case.components):
        model, _ = fused.load(fused.by_reference / component, fused.case.loaded)
        theirs = fused.reference(number)
        state = model.state_dict()
        assert [n for n, t in theirs.state_dict().items() if not torch.equal(t, state[n])] == []
        assert torch.equal(output(model, fused.size), output(theirs, fused.size))


def test_the_default_kernel_computes_the_same(fused: Fused) -> None:
    """Beside the float32 model: float32 to 1e-5, 16 bits to two and a half units in the last place."""
    bound = {FLOAT32: 1e-5, BFLOAT16: 2.5 * 2**-7, FLOAT16: 2.5 * 2**-10}[fused.case.loaded]
    for number, component in enumerate(fused.case.components):
        exact = output(fused.reference(number, FLOAT32), fused.size)
        model, _ = fused.load(fused.by_default / component, fused.case.loaded)
        assert distance(output(model, fused.size), exact) < bound
        if fused.case.loaded == FLOAT32:
            torch.testing.assert_close(output(model, fused.size), exact, rtol=1e-5, atol=1e-5)
        plain, _ = fused.load(fused.base / component, FLOAT32)
        assert distance(output(plain, fused.size), exact) > 5 * bound, "the LoRA should show"


# Whole pipelines and single files


def test_a_pipeline_loads_both_experts(tmp_path: Path) -> None:
    size = tiny("wan2.2-t2v-a14b")
    base = write_pipeline(tmp_path / "base", size, experts=True)
    loras = [write_lora(tmp_path / f"{n}.safetensors", size, style="extractor", seed=n) for n in range(2)]
    out = merge(base, [f"{loras[0]},{loras[1]}"], tmp_path / "out", dtype="bfloat16").out
    absent = dict.fromkeys(("text_encoder", "tokenizer", "vae"))
    pipeline_class: Any = diffusers.WanPipeline
    with quiet():
        pipe = pipeline_class.from_pretrained(out, torch_dtype=BFLOAT16, **absent)
    assert pipe.config.boundary_ratio == 0.875
    first, second = (model.state_dict() for model in (pipe.transformer, pipe.transformer_2))
    assert_same_numbers(first, weights(out / "transformer"))
    assert_same_numbers(second, weights(out / "transformer_2"))
    assert not any(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("base", ["wan2.1-i2v-14b", "wan2.2-t2v-a14b"])
def test_a_single_file_is_the_same_model(base: str, prefix: str, tmp_path: Path) -> None:
    size = tiny(base)
    pipeline = write_pipeline(tmp_path / "pipeline", size)
    file = write_file(tmp_path / "wan.safetensors", size, prefix=prefix, dtype="F32")
    lora = write_lora(tmp_path / "lora.safetensors", size, style="extractor")
    out = merge(file, [str(lora)], tmp_path / "file").out / "wan.safetensors"
    with quiet():
        loaded = model_class(size).from_single_file(str(out), config=str(pipeline / "transformer"))
    folder = merge(pipeline, [str(lora)], tmp_path / "folder").out
    assert_same_numbers(loaded.state_dict(), weights(folder / "transformer"))


def assert_same_numbers(loaded: Mapping[str, torch.Tensor], stored: Tensors) -> None:
    assert loaded.keys() == stored.keys()
    assert [n for n, t in stored.items() if not torch.equal(loaded[n], t.to(loaded[n].dtype))] == []
