"""Text encoders in single files: found by prefix, and changed as diffusers' own converters read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint, convert_open_clip_checkpoint

from fuselora.checkpoint import open_checkpoint
from fuselora.describe import describe
from fuselora.description import CheckpointDescription
from fuselora.errors import Refused
from fuselora.inner_encoders import PREFIXES, inner_encoders
from fuselora.pipeline import merge
from fuselora.verify import verify
from tests.cases.builders import read_folder, save

WIDTH, HIDDEN = 12, 20
UNET = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight"
LAYER = "text_model.encoder.layers.{}"
MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "mlp.fc1",
    "mlp.fc2",
)
SDXL_CLIP, SDXL_OPEN_CLIP = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors, str], Mapping[str, torch.Tensor]]


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Small whole numbers, so that sums and products of few are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def clip(prefix: str) -> Tensors:
    """Two layers by transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.token_embedding.weight": (30, WIDTH),
        "embeddings.position_embedding.weight": (7, WIDTH),
    }
    for n in range(2):
        layer = f"encoder.layers.{n}"
        for name in MODULES:
            rows, columns = {"mlp.fc1": (HIDDEN, WIDTH), "mlp.fc2": (WIDTH, HIDDEN)}.get(name, (WIDTH, WIDTH))
            shapes |= {f"{layer}.{name}.weight": (rows, columns), f"{layer}.{name}.bias": (rows,)}
    named = {f"{prefix}text_model.{name}": shape for name, shape in shapes.items()}
    return {name: noise(*shape, seed=n) for n, (name, shape) in enumerate(named.items())}


def open_clip(prefix: str) -> Tensors:
    """Two layers by OpenCLIP's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (30, WIDTH), "positional_embedding": (7, WIDTH),
        "text_projection": (WIDTH, WIDTH), "ln_final.weight": (WIDTH,), "ln_final.bias": (WIDTH,),
    }  # fmt: skip
    for n in range(2):
        block = f"transformer.resblocks.{n}"
        shapes |= {
            f"{block}.{norm}.{leaf}": (WIDTH,) for norm in ("ln_1", "ln_2") for leaf in ("weight", "bias")
        }
        shapes |= {
            f"{block}.attn.in_proj_weight": (3 * WIDTH, WIDTH),
            f"{block}.attn.in_proj_bias": (3 * WIDTH,),
        }
        shapes |= {f"{block}.attn.out_proj.weight": (WIDTH, WIDTH), f"{block}.attn.out_proj.bias": (WIDTH,)}
        shapes |= {f"{block}.mlp.c_fc.weight": (HIDDEN, WIDTH), f"{block}.mlp.c_fc.bias": (HIDDEN,)}
        shapes |= {f"{block}.mlp.c_proj.weight": (WIDTH, HIDDEN), f"{block}.mlp.c_proj.bias": (WIDTH,)}
    return {prefix + name: noise(*shape, seed=50 + n) for n, (name, shape) in enumerate(shapes.items())}


def by_transformers_names(tensors: Tensors, prefix: str) -> Mapping[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = convert_ldm_clip_checkpoint(tensors, remove_prefix=prefix)  # type: ignore[no-untyped-call]
    return found


def by_open_clips_names(tensors: Tensors, prefix: str) -> Mapping[str, torch.Tensor]:
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=WIDTH))
    found: dict[str, torch.Tensor] = convert_open_clip_checkpoint(model, tensors, prefix)  # type: ignore[no-untyped-call]
    return found


ENCODERS: list[tuple[str, str, Callable[[str], Tensors], Convert]] = [
    ("cond_stage_model.transformer.", "lora_te_", clip, by_transformers_names),
    ("cond_stage_model.model.", "lora_te_", open_clip, by_open_clips_names),
    (SDXL_CLIP, "lora_te1_", clip, by_transformers_names),
    (SDXL_OPEN_CLIP, "lora_te2_", open_clip, by_open_clips_names),
    (SDXL_OPEN_CLIP, "text_encoder_2.", open_clip, by_open_clips_names),
    ("conditioner.embedders.0.model.", "lora_te2_", open_clip, by_open_clips_names),
    ("text_encoders.clip_l.transformer.", "lora_te1_", clip, by_transformers_names),
    ("text_encoders.clip_l.transformer.", "text_encoders.clip_l.transformer.", clip, by_transformers_names),
]


def lora_tensors(prefix: str, weights: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """A LoRA of every linear layer, and the deltas that it stands for, by transformers' names."""
    stored: Tensors = {}
    deltas: Tensors = {}
    for n, (name, weight) in enumerate(sorted(weights.items())):
        module = name.removesuffix(".weight")
        if not module.endswith(MODULES) or weight.ndim != 2:
            continue
        up, down = noise(weight.shape[0], 2, seed=100 + n), noise(2, weight.shape[1], seed=200 + n)
        key = prefix + (module.replace(".", "_") if prefix.endswith("_") else module)
        stored |= {
            f"{key}.lora_up.weight": up,
            f"{key}.lora_down.weight": down,
            f"{key}.alpha": torch.tensor(1.0),
        }
        deltas[name] = up.double() @ down.double() / 2
    return stored, deltas


@pytest.mark.parametrize(("prefix", "lora_prefix", "tensors", "convert"), ENCODERS)
def test_every_layer_changes_as_diffusers_reads_the_file(
    tmp_path: Path, prefix: str, lora_prefix: str, tensors: Callable[[str], Tensors], convert: Convert
) -> None:
    base = {UNET: noise(8, 8, seed=1), **tensors(prefix)}
    before = convert(base, prefix)
    stored, deltas = lora_tensors(lora_prefix, before)
    assert len(deltas) == 2 * len(MODULES)
    file, lora = save(tmp_path / "base.safetensors", base), save(tmp_path / "x.safetensors", stored)
    report = merge(file, [lora], tmp_path / "out")
    fused = read_folder(tmp_path / "out")
    after = convert(fused, prefix)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        expected = (weight.double() + deltas[name]).float() if name in deltas else weight
        assert torch.equal(after[name], expected), name
    assert torch.equal(fused[UNET], base[UNET])
    (component,) = report.plan.components
    assert component.n_fused == len(deltas) - (4 if tensors is open_clip else 0)
    assert verify(tmp_path / "out", base=file, loras=[lora]).ok


def pair_of(key: str, rows: int) -> Tensors:
    """Of rank 2, for a layer with ``rows`` outputs."""
    return {
        f"{key}.lora_down.weight": noise(2, WIDTH, seed=5),
        f"{key}.lora_up.weight": noise(rows, 2, seed=6),
    }


def sdxl(folder: Path) -> tuple[Path, Tensors]:
    base = {UNET: noise(8, 8, seed=1), **clip(SDXL_CLIP), **open_clip(SDXL_OPEN_CLIP)}
    return save(folder / "sdxl.safetensors", base), base


def test_a_kohya_file_of_the_unet_and_both_encoders(tmp_path: Path) -> None:
    file, base = sdxl(tmp_path)
    q = "text_model_encoder_layers_0_self_attn_q_proj"
    stored = {**pair_of(f"lora_te1_{q}", WIDTH), **pair_of(f"lora_te2_{q}", WIDTH)}
    unet = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    stored |= {f"{unet}.lora_down.weight": noise(2, 8, seed=7), f"{unet}.lora_up.weight": noise(8, 2, seed=8)}
    merge(file, [save(tmp_path / "x.safetensors", stored)], tmp_path / "out")
    fused = read_folder(tmp_path / "out")
    in_proj = f"{SDXL_OPEN_CLIP}transformer.resblocks.0.attn.in_proj_weight"
    changed = {name for name in base if not torch.equal(fused[name], base[name])}
    assert changed == {UNET, f"{SDXL_CLIP}text_model.encoder.layers.0.self_attn.q_proj.weight", in_proj}
    assert torch.equal(fused[in_proj][WIDTH:], base[in_proj][WIDTH:])


def test_a_file_given_for_one_encoder(tmp_path: Path) -> None:
    file, base = sdxl(tmp_path)
    key = "text_model.encoder.layers.1.mlp.fc1"
    pair = {f"{key}.lora_A.weight": noise(2, WIDTH, seed=5), f"{key}.lora_B.weight": noise(HIDDEN, 2, seed=6)}
    lora = save(tmp_path / "x.safetensors", pair)
    for name, changed in (
        ("text_encoder", f"{SDXL_CLIP}{key}.weight"),
        ("text_encoder_2", f"{SDXL_OPEN_CLIP}transformer.resblocks.1.mlp.c_fc.weight"),
    ):
        merge(file, [f"{name}={lora}"], tmp_path / name)
        fused = read_folder(tmp_path / name)
        assert [n for n in base if not torch.equal(fused[n], base[n])] == [changed]
    with pytest.raises(Refused, match="has only transformer, text_encoder, text_encoder_2"):
        merge(file, [f"text_encoder_3={lora}"], tmp_path / "none")


def test_keys_of_one_encoder_given_for_another(tmp_path: Path) -> None:
    file, _ = sdxl(tmp_path)
    key = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    pair = pair_of(key, HIDDEN)
    lora = save(tmp_path / "x.safetensors", pair)
    with pytest.raises(Refused, match="has keys for lora_te1, and was given for text_encoder_2"):
        merge(file, [f"text_encoder_2={lora}"], tmp_path / "out")
    merge(file, [f"text_encoder={lora}"], tmp_path / "out")


def test_what_could_be_either_encoder_is_refused(tmp_path: Path) -> None:
    file, _ = sdxl(tmp_path)
    key = "lora_te_text_model_encoder_layers_0_mlp_fc1"
    pair = pair_of(key, HIDDEN)
    with pytest.raises(Refused, match=f"could be {SDXL_CLIP}.* or {SDXL_OPEN_CLIP}"):
        merge(file, [save(tmp_path / "x.safetensors", pair)], tmp_path / "out")


def test_an_unknown_layer_of_an_encoder_that_is_there(tmp_path: Path) -> None:
    file, _ = sdxl(tmp_path)
    unet = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    stored = {f"{unet}.lora_down.weight": noise(2, 8, seed=7), f"{unet}.lora_up.weight": noise(8, 2, seed=8)}
    key = "lora_te1_text_model_encoder_layers_9_mlp_fc1"
    stored |= pair_of(key, HIDDEN)
    with pytest.raises(Refused) as caught:
        merge(file, [save(tmp_path / "x.safetensors", stored)], tmp_path / "out")
    (fault,) = caught.value.faults
    assert f"{key} has no home in transformer" in fault.message
    assert "does not have" not in fault.message
    assert "fuse into a pipeline" not in str(fault.hint)


def test_text_encoders_keep_their_dtype(tmp_path: Path) -> None:
    file, base = sdxl(tmp_path)
    key = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    pair = pair_of(key, HIDDEN)
    lora = save(tmp_path / "x.safetensors", pair)
    merge(file, [lora], tmp_path / "out", dtype="bfloat16")
    fused = read_folder(tmp_path / "out")
    assert {name: t.dtype for name, t in fused.items()} == {
        name: torch.bfloat16 if name == UNET else torch.float32 for name in base
    }
    assert verify(tmp_path / "out", base=file, loras=[lora]).ok


def test_the_order_in_which_comfyuis_files_are_numbered() -> None:
    """SD3's and FLUX's, as their pipelines call them."""
    last = "transformer.final_layer_norm.weight"
    sd3 = {f"text_encoders.{kind}.{last}": (4,) for kind in ("t5xxl", "clip_g", "clip_l")}
    assert [one.name for one in inner_encoders(sd3)] == ["text_encoder", "text_encoder_2", "text_encoder_3"]
    assert [one.prefix.split(".")[1] for one in inner_encoders(sd3)] == ["clip_l", "clip_g", "t5xxl"]
    flux = {f"text_encoders.{kind}.{last}": (4,) for kind in ("t5xxl", "clip_l")}
    assert [one.prefix.split(".")[1] for one in inner_encoders(flux)] == ["clip_l", "t5xxl"]


def test_what_is_known_of_each_prefix() -> None:
    for prefix, name in PREFIXES.items():
        (found,) = inner_encoders({f"{prefix}token_embedding.weight": (30, 768)})
        assert (found.name, found.prefix, found.config["hidden_size"]) == (name, prefix, 768)
    (found,) = inner_encoders({"text_encoders.t5xxl.transformer.shared.weight": (30, 4096)})
    assert found.config == {"model_type": "t5", "hidden_size": 4096}
    assert inner_encoders({"text_encoders.unheard_of.transformer.x": (1,), "first_stage_model.x": (1,)}) == ()


def test_a_file_is_looked_through_by_its_own_name_and_by_its_folders(tmp_path: Path) -> None:
    """An OUT that is to be stacked on is a folder of one file."""
    file, _ = sdxl(tmp_path)
    for root in (file, tmp_path):
        checkpoint = open_checkpoint(root, source=str(root), revision=None, variant=None)
        assert [one.name for one in checkpoint.components[0].inner] == ["text_encoder", "text_encoder_2"]


def test_the_same_layer_of_both_encoders_at_other_scales(tmp_path: Path) -> None:
    """The marker has a scale for each."""
    file, _ = sdxl(tmp_path)
    stored: Tensors = {}
    for n in (1, 2):
        key = f"lora_te{n}_text_model_encoder_layers_0_self_attn_q_proj"
        stored |= {
            f"{key}.lora_down.weight": noise(2, WIDTH, seed=5 + n),
            f"{key}.alpha": torch.tensor(float(n)),
        }
        stored |= {f"{key}.lora_up.weight": noise(WIDTH, 2, seed=8 + n)}
    lora = save(tmp_path / "x.safetensors", stored)
    merge(file, [lora], tmp_path / "out", blocks=["lora_te2_*=0.5"])
    assert verify(tmp_path / "out", base=file, loras=[lora]).ok


@pytest.mark.parametrize("glob", ["text_encoder_2=*", "text_encoder_2.*", "text_encoder_2.text_model.*"])
def test_a_glob_for_an_encoder_in_the_file_says_how_its_modules_are_named(tmp_path: Path, glob: str) -> None:
    file, base = sdxl(tmp_path)
    keys = [f"lora_te{n}_text_model_encoder_layers_{layer}_mlp_fc1" for n in (1, 2) for layer in (0, 1)]
    stored = {name: t for key in keys for name, t in pair_of(key, HIDDEN).items()}
    lora = save(tmp_path / "x.safetensors", stored)
    with pytest.raises(Refused) as caught:
        merge(file, [lora], tmp_path / "out", blocks=[f"{glob}=0"])
    proposed = (caught.value.hint or "").rpartition(" ")[2]
    assert proposed == "lora_te2_text_model_encoder_layers_*"
    merge(file, [lora], tmp_path / "out", blocks=[f"{proposed}=0"])
    fused = read_folder(tmp_path / "out")
    changed = {name for name in base if not torch.equal(fused[name], base[name])}
    assert changed == {f"{SDXL_CLIP}{LAYER.format(n)}.mlp.fc1.weight" for n in (0, 1)}


def test_each_part_has_the_alpha_that_the_metadata_gives_it(tmp_path: Path) -> None:
    """As diffusers saves a LoRA of several models."""
    file, base = sdxl(tmp_path)
    keys = [f"text_encoder{n}.text_model.encoder.layers.0.mlp.fc1" for n in ("", "_2")]
    stored = {name: t for key in keys for name, t in pair_of(key, HIDDEN).items()}
    alphas = {f"text_encoder{n}.lora_alpha": alpha for n, alpha in (("", 2), ("_2", 4))}
    ranks = {f"text_encoder{n}.r": 2 for n in ("", "_2")}
    lora = save(
        tmp_path / "x.safetensors", stored, {"lora_adapter_metadata": json.dumps({**alphas, **ranks})}
    )
    merge(file, [lora], tmp_path / "out")
    fused = read_folder(tmp_path / "out")
    delta = noise(HIDDEN, 2, seed=6) @ noise(2, WIDTH, seed=5)
    first = f"{SDXL_CLIP}text_model.encoder.layers.0.mlp.fc1.weight"
    second = f"{SDXL_OPEN_CLIP}transformer.resblocks.0.mlp.c_fc.weight"
    assert torch.equal(fused[first], base[first] + delta)
    assert torch.equal(fused[second], base[second] + 2 * delta)
    assert verify(tmp_path / "out", base=file, loras=[lora]).ok


@pytest.mark.parametrize(("said", "warnings"), [(2, []), (6, ["says alpha 6, its tensors say 2"])])
def test_the_alphas_of_each_part_are_held_against_its_own_metadata(
    tmp_path: Path, said: int, warnings: list[str]
) -> None:
    file, _ = sdxl(tmp_path)
    stored: Tensors = {}
    for alpha, part in ((4, "text_encoder"), (2, "text_encoder_2")):
        key = f"{part}.text_model.encoder.layers.0.mlp.fc1"
        stored |= {**pair_of(key, HIDDEN), f"{key}.alpha": torch.tensor(float(alpha))}
    document = {"text_encoder.lora_alpha": 4, "text_encoder.r": 2}
    document |= {"text_encoder_2.lora_alpha": said, "text_encoder_2.r": 2}
    metadata = {"lora_adapter_metadata": json.dumps(document)}
    lora = save(tmp_path / "x.safetensors", stored, metadata)
    built = merge(file, [lora], tmp_path / "out")
    texts = [notice.message for notice in built.notices if notice.code == "metadata_disagrees"]
    assert len(texts) == len(warnings)
    assert all(wanted in text for wanted, text in zip(warnings, texts, strict=True))


def test_a_name_for_any_encoder_given_for_one(tmp_path: Path) -> None:
    file, base = sdxl(tmp_path)
    key = "lora_te_text_model_encoder_layers_1_mlp_fc1"
    pair = pair_of(key, HIDDEN)
    merge(file, [f"text_encoder_2={save(tmp_path / 'x.safetensors', pair)}"], tmp_path / "out")
    fused = read_folder(tmp_path / "out")
    changed = [name for name in base if not torch.equal(fused[name], base[name])]
    assert changed == [f"{SDXL_OPEN_CLIP}transformer.resblocks.1.mlp.c_fc.weight"]


def test_two_encoders_of_one_name_are_not_told_apart(tmp_path: Path) -> None:
    both = [
        *clip("cond_stage_model.transformer.").items(),
        *clip("text_encoders.clip_l.transformer.").items(),
    ]
    file = save(tmp_path / "base.safetensors", {UNET: noise(8, 8, seed=1), **dict(both)})
    key = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    pair = pair_of(key, HIDDEN)
    lora = save(tmp_path / "x.safetensors", pair)
    for given in (str(lora), f"text_encoder={lora}"):
        with pytest.raises(Refused):
            merge(file, [given], tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight", "positional_embedding"]
)
@pytest.mark.parametrize("shape", [(), (5,), (7, 3, 2)])
def test_odd_shapes_in_an_encoder_are_no_traceback(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    odd = {**open_clip(SDXL_OPEN_CLIP), f"{SDXL_OPEN_CLIP}{name}": noise(*shape, seed=3)}
    file = save(tmp_path / "base.safetensors", {UNET: noise(8, 8, seed=1), **odd})
    assert isinstance(describe(file), CheckpointDescription)
    key = "lora_te2_text_model_encoder_layers_0_self_attn_q_proj"
    pair = pair_of(key, WIDTH)
    lora = save(tmp_path / "x.safetensors", pair)
    if "in_proj" in name:
        with pytest.raises(Refused):
            merge(file, [lora], tmp_path / "out")
    else:
        merge(file, [lora], tmp_path / "out")
