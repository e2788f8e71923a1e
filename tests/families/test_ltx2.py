"""LTX-2: both spellings, its text connectors, the models since 2.3, and the LoRA of its second stage.

The rows of 2.0 are held against diffusers' converter in ``test_differences``. That converter leaves two of
the names that 2.3 brought; what diffusers' script does to them is written out here.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils
from diffusers.pipelines import ltx2
from safetensors.torch import load_file

import fuselora
from fuselora.checkpoint import open_checkpoint
from fuselora.families.ltx2 import LTX_2
from fuselora.families.recognition import family_of
from fuselora.pipeline import plan
from fuselora.synth import Spec
from fuselora.verify import verify
from tests import listings, small

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fuselora.families import Layout
    from fuselora.planning import FusePlan

classes: Any = diffusers
connectors: Any = ltx2
converters: Any = single_file_utils
Tensors = dict[str, torch.Tensor]
DISTILLED = "ltx-2-19b.distilled-384"
GATED = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
V23 = {**GATED, "use_prompt_embeddings": False}
V25 = {**V23, "ff_bias": False, "use_keyframes_abs_pos_embedding": True}
LITTLE = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
    "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 24,
    "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16,
}  # fmt: skip
PROJECTION = "text_embedding_projection.aggregate_embed"


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = classes.LTX2VideoTransformer3DModel(**config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_the_published_files_have_each_other_s_names() -> None:
    ours, theirs = (
        {spec.name: spec.shape for spec in listings.base("ltx-2-19b", layout)}
        for layout in ("diffusers", "native")
    )
    assert {found.name: found.shape for found in LTX_2.spellings(ours, "native")} == theirs
    assert LTX_2.canonical_shapes(theirs, "native") == ours


@pytest.mark.parametrize(
    ("config", "models"),
    [({}, ("LTX-2-19B",)), (V23, ("LTX-2.3-22B",)), (V25, ("LTX-2.5-22B",)), ({"num_layers": 47}, ())],
)
def test_the_models_of_the_class(config: Mapping[str, Any], models: tuple[str, ...]) -> None:
    shapes = shapes_of(config)
    native = {found.name: found.shape for found in LTX_2.spellings(shapes, "native")}
    for spelled in (shapes, native):
        assert family_of(spelled) is LTX_2
        assert LTX_2.share(spelled) == 1.0
        assert LTX_2.models_of(spelled) == models


def test_a_lora_of_the_gates_is_for_later_models() -> None:
    gates = {"transformer_blocks.3.attn2.to_gate_logits.weight": (32, 4096)}
    captions = {"caption_projection.linear_1.weight": (4096, 3840)}
    assert [kin.models for kin in LTX_2.kin_of_deltas(gates)] == [("LTX-2.3-22B",), ("LTX-2.5-22B",)]
    assert [kin.models for kin in LTX_2.kin_of_deltas(captions)] == [("LTX-2-19B",)]


def in_diffusers(native: Mapping[str, torch.Tensor]) -> Tensors:
    """Diffusers' converter, and after it the two renames that only its script has."""
    found: Tensors = converters.convert_ltx2_transformer_to_diffusers(dict(native))
    return {re.sub(r"^(audio_)?prompt_adaln_single\.", r"\1prompt_adaln.", n): t for n, t in found.items()}


def random(shapes: Mapping[str, tuple[int, ...]], start: int) -> Tensors:
    return {name: small.noise(*shape, seed=start + n) for n, (name, shape) in enumerate(shapes.items())}


def a_lora(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> tuple[Tensors, Tensors]:
    """A pair for every matrix that has rows enough, and a difference for each bias, with what they add."""
    lora: Tensors = {}
    deltas = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for seed, (name, shape) in enumerate(shapes.items()):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(shape) == 2:
            up, down = small.noise(shape[0], 2, seed=seed), small.noise(2, shape[1], seed=seed + 500)
            lora |= {f"{prefix}{module}.lora_A.weight": down, f"{prefix}{module}.lora_B.weight": up}
            deltas[name] = up.double() @ down.double()
        elif leaf == "bias":
            lora[f"{prefix}{module}.diff_b"] = small.noise(*shape, seed=seed)
            deltas[name] = lora[f"{prefix}{module}.diff_b"].double()
    return lora, deltas


@pytest.mark.parametrize("base_is_native", [True, False])
@pytest.mark.parametrize("lora_is_native", [True, False])
@pytest.mark.parametrize("config", [{}, V23, V25], ids=["2.0", "2.3", "2.5"])
def test_every_layer_in_every_direction(
    tmp_path: Path, config: Mapping[str, Any], lora_is_native: bool, base_is_native: bool
) -> None:
    shapes = shapes_of({**LITTLE, **config})
    theirs = {found.name: found.shape for found in LTX_2.spellings(shapes, "native")}
    native = random(theirs, 1)
    ours = in_diffusers(native)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == shapes
    lora, deltas = a_lora(
        theirs if lora_is_native else shapes, "diffusion_model." if lora_is_native else "transformer."
    )
    prefix = "model.diffusion_model." if base_is_native else ""
    base = {prefix + name: tensor for name, tensor in (native if base_is_native else ours).items()}
    base_path = small.write(tmp_path / "base.safetensors", base)
    path = small.write(tmp_path / "x.safetensors", lora)
    fuselora.merge(base_path, [path], out=tmp_path / "out")
    found = load_file(tmp_path / "out" / "base.safetensors")
    got = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    after = in_diffusers(got) if base_is_native else got
    moved = in_diffusers(deltas) if lora_is_native else deltas
    assert after.keys() == ours.keys() == moved.keys()
    for name, tensor in ours.items():
        exact = tensor.double() + moved[name]
        torch.testing.assert_close(after[name].double(), exact, rtol=2e-6, atol=2e-6)
    assert verify(tmp_path / "out", base=base_path, loras=[path]).ok


def a_pipeline(root: Path) -> Path:
    """A small transformer and the connectors of its kind, as a pipeline's folder."""
    torch.manual_seed(0)
    classes.LTX2VideoTransformer3DModel(**LITTLE).save_pretrained(root / "transformer")
    connectors.LTX2TextConnectors(
        caption_channels=24, text_proj_in_factor=3, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=12, video_connector_num_layers=1,
        video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=12, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
    ).save_pretrained(root / "connectors")  # fmt: skip
    parts = {"transformer": "LTX2VideoTransformer3DModel", "connectors": "LTX2TextConnectors"}
    index = {name: ["diffusers", kind] for name, kind in parts.items()}
    (root / "model_index.json").write_text(json.dumps({"_class_name": "LTX2Pipeline", **index}))
    return root


def weights_of(root: Path, component: str) -> Tensors:
    found: Tensors = load_file(root / component / "diffusion_pytorch_model.safetensors")
    return found


def a_distilled_lora(path: Path, projection: str = PROJECTION) -> tuple[Path, Tensors]:
    """As the published one: some layers of the transformer, and the projection before the connectors."""
    lora = {}
    for n, (name, out, into) in enumerate((
        ("diffusion_model.patchify_proj", 32, 4),
        ("diffusion_model.transformer_blocks.1.audio_to_video_attn.to_q", 16, 32),
        ("diffusion_model.av_ca_a2v_gate_adaln_single.linear", 32, 32),
        (projection, 24, 72),
    )):  # fmt: skip
        lora[f"{name}.lora_A.weight"] = small.noise(2, into, seed=n)
        lora[f"{name}.lora_B.weight"] = small.noise(out, 2, seed=n + 10)
    return small.write(path, lora), lora


def product(lora: Tensors, module: str) -> torch.Tensor:
    return lora[f"{module}.lora_B.weight"].double() @ lora[f"{module}.lora_A.weight"].double()


@pytest.mark.parametrize(
    "projection", [PROJECTION, f"diffusion_model.{PROJECTION}", "connectors.text_proj_in"]
)
def test_a_pipeline_s_connectors_take_their_part(tmp_path: Path, projection: str) -> None:
    base = a_pipeline(tmp_path / "base")
    path, lora = a_distilled_lora(tmp_path / "ltx-2-19b-distilled-lora-384.safetensors", projection)
    report = fuselora.merge(base, [path], out=tmp_path / "out")
    assert [m.assignment.component.name for m in report.plan.matchings] == ["transformer", "connectors"]
    assert not any(matching.skipped for matching in report.plan.matchings)
    before, after = (weights_of(root, "connectors") for root in (base, tmp_path / "out"))
    for name, tensor in before.items():
        delta = product(lora, projection) if name == "text_proj_in.weight" else torch.zeros(())
        torch.testing.assert_close(after[name].double(), tensor.double() + delta, rtol=2e-6, atol=2e-6)
    places = {
        "proj_in": "patchify_proj",
        "transformer_blocks.1.audio_to_video_attn.to_q": "transformer_blocks.1.audio_to_video_attn.to_q",
        "av_cross_attn_video_a2v_gate.linear": "av_ca_a2v_gate_adaln_single.linear",
    }
    before, after = (weights_of(root, "transformer") for root in (base, tmp_path / "out"))
    for ours, theirs in places.items():
        exact = before[f"{ours}.weight"].double() + product(lora, f"diffusion_model.{theirs}")
        torch.testing.assert_close(after[f"{ours}.weight"].double(), exact, rtol=2e-6, atol=2e-6)
    assert verify(tmp_path / "out", base=base, loras=[path]).ok


def test_the_merged_pipeline_loads_and_runs(tmp_path: Path) -> None:
    base = a_pipeline(tmp_path / "base")
    path, _ = a_distilled_lora(tmp_path / "x.safetensors")
    fuselora.merge(base, [path], out=tmp_path / "out")
    outputs = []
    for root in (base, tmp_path / "out"):
        text = connectors.LTX2TextConnectors.from_pretrained(root / "connectors")
        model = classes.LTX2VideoTransformer3DModel.from_pretrained(root / "transformer")
        with torch.no_grad():
            video, audio, mask = text(small.noise(1, 4, 24, 3), torch.ones(1, 4))
            outputs.append(
                model(
                    hidden_states=small.noise(1, 8, 4), audio_hidden_states=small.noise(1, 2, 4),
                    encoder_hidden_states=video, audio_encoder_hidden_states=audio,
                    timestep=torch.tensor([[5.0]]), encoder_attention_mask=mask,
                    audio_encoder_attention_mask=mask, num_frames=2, height=2, width=2, audio_num_frames=2,
                    return_dict=False,
                )[0]
            )  # fmt: skip
    assert outputs[1].isfinite().all() and not torch.allclose(outputs[0], outputs[1])


def test_other_pipelines_keys_of_any_encoder_are_not_for_connectors(tmp_path: Path) -> None:
    """lora_te_ means the one text encoder there is."""
    root = a_pipeline(tmp_path / "base")
    small.write(root / "text_encoder" / "model.safetensors", {"layers.0.q.weight": small.noise(4, 4)})
    (root / "text_encoder" / "config.json").write_text("{}")
    found = open_checkpoint(root, source="x", revision=None, variant=None, text_encoders=["lora_te"])
    assert [component.name for component in found.components] == ["transformer", "text_encoder"]


def test_a_single_file_s_projection_stands_beside_the_model(tmp_path: Path) -> None:
    shapes = {found.name: found.shape for found in LTX_2.spellings(shapes_of(LITTLE), "native")}
    base = {f"model.diffusion_model.{name}": tensor for name, tensor in random(shapes, 1).items()}
    base |= {f"{PROJECTION}.weight": small.noise(24, 72), "vae.encoder.conv_in.weight": small.noise(4, 4)}
    base_path = small.write(tmp_path / "base.safetensors", base)
    path, lora = a_distilled_lora(tmp_path / "x.safetensors")
    report = fuselora.merge(base_path, [path], out=tmp_path / "out")
    assert not report.plan.matchings[0].skipped
    got = load_file(tmp_path / "out" / "base.safetensors")
    exact = base[f"{PROJECTION}.weight"].double() + product(lora, PROJECTION)
    torch.testing.assert_close(got[f"{PROJECTION}.weight"].double(), exact, rtol=2e-6, atol=2e-6)
    assert torch.equal(got["vae.encoder.conv_in.weight"], base["vae.encoder.conv_in.weight"])


def the_published(folder: Path, layout: Layout, *, whole: bool) -> FusePlan:
    """The plan of the published LoRA on the published base, with its connectors or without them."""
    specs = listings.base("ltx-2-19b", layout)
    lora = listings.sparse(folder / "ltx-2-19b-distilled-lora-384.safetensors", listings.lora(DISTILLED))
    projection = {"name": "text_proj_in.weight" if layout == "diffusers" else f"{PROJECTION}.weight"}
    wide = Spec(projection["name"], "BF16", (3840, 188160))
    if layout == "native":
        named = [replace(spec, name=f"model.diffusion_model.{spec.name}") for spec in specs]
        return plan(listings.sparse(folder / "base.safetensors", [*named, wide] if whole else named), [lora])
    listings.sparse(folder / "base" / "transformer" / "diffusion_pytorch_model.safetensors", specs)
    if whole:
        listings.sparse(folder / "base" / "connectors" / "diffusion_pytorch_model.safetensors", [wide])
    return plan(folder / "base", [lora])


@pytest.mark.parametrize("layout", ["native", "diffusers"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_published_lora_is_applied_or_explained(tmp_path: Path, layout: Layout, whole: bool) -> None:
    found = the_published(tmp_path, layout, whole=whole)
    applied = {tensor.name for matching in found.matchings for hit in matching.hits for tensor in hit.tensors}
    skips = [skip for matching in found.matchings for skip in matching.skipped]
    assert len(listings.lora(DISTILLED)) == 2742
    assert len(applied) == (2742 if whole else 2740)
    reason = "it is for the text connectors, which this base does not have"
    assert [(skip.module.name, skip.reason) for skip in skips] == ([] if whole else [(PROJECTION, reason)])
    (notice,) = (notice for notice in found.notices if notice.code == "phase")
    assert (
        "the second stage, which refines the upsampled latents; the first samples without it"
        in notice.message
    )


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("ltx-2-19b-distilled-lora-384.safetensors", True),
        ("ltx-2.3-22b-distilled-lora-384-1.1.safetensors", True),
        ("ltx-2.5-22b-distilled-lora-450-bf16.safetensors", False),
        ("ltx-2-19b-ic-lora-detailer.safetensors", False),
    ],
)
def test_which_loras_are_for_the_second_stage_alone(name: str, is_known: bool) -> None:
    row = LTX_2.few_step_named(name)
    assert (row is not None) == is_known
    if row:
        assert row.phase and row.remark and row.guidance_scale == 1.0
