"""What published names and headers say of sampling, and what they do not."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

from fuselora.families.wan import WAN
from fuselora.lora.sampling import MAX_STEPS, Sampling, sampling_of, steps_in
from fuselora.specs import LoraSpec
from tests.inputs import open_lora, pair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuselora.families import Family

SEKO = "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1"
HIGH = "high_noise_model.safetensors"


def said(
    folder: Path, path: str, family: Family | None = WAN, metadata: Mapping[str, str] | None = None
) -> Sampling:
    """Of a LoRA on the Hub (``hf://``), or of one in ``folder``."""
    hub = path.startswith("hf://")
    where = folder / "cache" / PurePosixPath(path).name if hub else folder / path
    spec = LoraSpec(path if hub else str(where))
    return sampling_of(open_lora(where, pair("q"), spec=spec, metadata=metadata), family)


def values(sampling: Sampling) -> dict[str, Any]:
    return {name: stated.value for name, stated in sampling.settings.items()}


# Steps in a name


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        (SEKO, 4),
        ("Wan2.2-T2V-A14B-4steps-lora-250928", 4),
        ("Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V2.0", 4),
        ("wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022", 4),
        ("wan2.2_t2v_A14b_low_noise_lora_rank64_lightx2v_4step_1217", 4),
        ("Wan_2_2_I2V_A14B_HIGH_lightx2v_4step_lora_v1030_rank_64_bf16", 4),
        ("wan2.1_t2v_14b_lora_rank64_lightx2v_4step", 4),
        ("Wan2.2-Lightning_I2V-A14B-4steps-lora_HIGH_fp16", 4),
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise", 4),
        ("Wan2.2_I2V_LightX2V_2step_high_noise", 2),
        ("Qwen-Image-Lightning-8steps-V1.1-bf16", 8),
        ("Qwen-Image-Edit-2509-Lightning-4steps-V1.0-fp32", 4),
        ("SenseNova-U1.5-8B-MoT-LoRA-8step", 8),
        ("Hyper-FLUX.1-dev-16steps-lora", 16),
        ("Hyper-SDXL-1step-lora", 1),
        ("sdxl_lightning_8step_lora", 8),
        ("dmd2_sdxl_4step_lora_fp16", 4),
        ("minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16", 4),
        ("Z-Image-Fun-Lora-Distill-8-Steps-2603-ComfyUI", 8),
        ("4-step", 4),
        ("my 4 steps lora", 4),
        ("lora_4_steps", 4),
        ("4STEPS", 4),
        ("Wan2.2-4steps", 4),
    ],
)
def test_a_name_that_states_its_steps(name: str, steps: int) -> None:
    assert steps_in(name) == steps
    assert steps_in(f"{name}.safetensors") == steps


@pytest.mark.parametrize(
    "name",
    [
        "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16",
        "lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank128_bf16",
        "wan2.1-i2v-14b-480p.kijai-cfgstep.r64",
        "cfg_step_lora",
        "Wan2.1-T2V-14B-StepDistill-CfgDistill-Lightx2v",
        "Wan21_CausVid_14B_T2V_lora_rank32_v2",
        "Wan21_CausVid_bidirect2_T2V_1_3B_lora_rank32",
        "Wan22_TI2V_5B_Turbo_lora_rank_64_fp16",
        "ltx-2.3-22b-distilled-lora-384-1.1",
        "high_noise_model",
        "style_epoch_2_step_1000",
        "high_mystyle_rank_16_steps_2000",
        "style_epoch_2_steps_5000",
        "style_dim_16_alpha_16_steps_3000",
        "style_lr_1e-4_bs_1_steps_3000",
        "style_gpu_8_steps_500",
        "my-lora-10-steps-1000",
        "distill_4_8_steps",
        "distill_4,8steps",
        "lora_v1_3_steps",
        "style-epoch-2-step-1000",
        "style_step_4",
        "style-step00000004",
        "style_1000steps",
        "style_20000_steps",
        "style-50steps",
        "style-0steps",
        "trained-4stepsize",
        "footsteps",
        "v4step",
        "v1.4step",
        "lora-4-8steps",
        "4step-to-8step",
        "Wan_2_2_step_distill",
        "٤steps",
        "",
    ],
)
def test_a_name_that_states_none_or_not_just_one(name: str) -> None:
    assert steps_in(name) is None


def test_many_steps_are_a_training(tmp_path: Path) -> None:
    assert steps_in(f"x-{MAX_STEPS}steps") == MAX_STEPS
    assert steps_in(f"x-{MAX_STEPS + 1}steps") is None


# Published LoRAs

FULL = {"num_inference_steps": 4, "guidance_scale": 1.0, "flow_shift": 5.0, "solver": "euler"}
NO_SOLVER = {name: value for name, value in FULL.items() if name != "solver"}
STEPS_ONLY = {"num_inference_steps": 4}
DMD = {"num_inference_steps": 3, "guidance_scale": 1.0}
WAN22 = "LightX2V's Wan2.2 distillation"
WAN21 = "LightX2V's Wan2.1 distillation"
KIJAI = "hf://Kijai/WanVideo_comfy"
PUBLISHED: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    (f"hf://lightx2v/Wan2.2-Lightning/{SEKO}/{HIGH}", "Wan2.2-Lightning", FULL),
    (f"hf://lightx2v/Wan2.2-Lightning@main/{SEKO}/low_noise_model.safetensors", "Wan2.2-Lightning", FULL),
    (
        "hf://lightx2v/Wan2.2-Lightning/Wan2.2-I2V-A14B-4steps-lora-rank64-Seko-V1/low_noise_model.safetensors",
        "Wan2.2-Lightning",
        FULL,
    ),
    (
        f"{KIJAI}/Wan22-Lightning/Wan2.2-Lightning_T2V-v1.1-A14B-4steps-lora_LOW_fp16.safetensors",
        "Wan2.2-Lightning",
        FULL,
    ),
    (f"hf://lightx2v/Wan2.2-Lightning/Wan2.2-T2V-A14B-4steps-lora-250928/{HIGH}", None, STEPS_ONLY),
    (f"hf://lightx2v/Wan2.2-Lightning/Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V2.0/{HIGH}", None, STEPS_ONLY),
    (
        f"{KIJAI}/LoRAs/Wan22-Lightning/Wan22_A14B_T2V_HIGH_Lightning_4steps_lora_250928_rank128_fp16.safetensors",
        None,
        STEPS_ONLY,
    ),
    (
        "hf://lightx2v/Wan2.2-Distill-Loras/wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.safetensors",
        WAN22,
        FULL,
    ),
    (
        f"{KIJAI}/LoRAs/Wan22_Lightx2v/Wan_2_2_I2V_A14B_LOW_lightx2v_4step_lora_260412_rank_64_fp16.safetensors",
        WAN22,
        FULL,
    ),
    (
        f"{KIJAI}/LoRAs/Wan22_Lightx2v/Wan_2_2_I2V_A14B_HIGH_lightx2v_MoE_distill_lora_rank_64_bf16.safetensors",
        WAN22,
        FULL,
    ),
    ("loras/wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors", WAN22, FULL),
    ("wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors", WAN21, NO_SOLVER),
    ("wan2.1_i2v_lora_rank64_lightx2v_4step.safetensors", WAN21, NO_SOLVER),
    (f"{KIJAI}/Lightx2v/lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", WAN21, NO_SOLVER),
    ("lightx2v_14B_T2V_cfg_step_distill_lora_adaptive_rank_quantile_0.15_bf16.safetensors", WAN21, NO_SOLVER),
    ("Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32.safetensors", WAN21, NO_SOLVER),
    ("Wan2_2_5B_FastWanFullAttn_lora_rank_128_bf16.safetensors", "FastWan2.2-TI2V-5B", DMD),
    ("FastWan_T2V_14B_480p_lora_rank_64_bf16.safetensors", "FastWan2.1-T2V", {**DMD, "flow_shift": 8.0}),
    (
        "Wan22_TI2V_5B_Turbo_lora_rank_64_fp16.safetensors",
        "Wan2.2-TI2V-5B-Turbo",
        {"num_inference_steps": 4, "guidance_scale": 1.0},
    ),
    ("Wan21_CausVid_14B_T2V_lora_rank32_v2.safetensors", "CausVid", {"guidance_scale": 1.0}),
    # a third party's, made for another number of steps
    ("Wan2.2_I2V_LightX2V_2step_high_noise.safetensors", None, {"num_inference_steps": 2}),
    ("Wan21_AccVid_T2V_14B_lora_rank32_fp16.safetensors", None, {}),
    ("Wan2.1_T2V_14B_FusionX_LoRA.safetensors", None, {}),
    ("Wan21_PusaV1_LoRA_14B_rank512_bf16.safetensors", None, {}),
    ("style.safetensors", None, {}),
)


@pytest.mark.parametrize(("path", "row", "expected"), PUBLISHED, ids=[path for path, *_ in PUBLISHED])
def test_what_a_published_lora_says(
    tmp_path: Path, path: str, row: str | None, expected: dict[str, Any]
) -> None:
    sampling = said(tmp_path, path)
    assert values(sampling) == expected
    published = [stated for stated in sampling.settings.values() if stated.source == "family"]
    assert bool(published) == (row is not None)
    assert all(stated.origin.startswith(f"published for {row} (") for stated in published)


def test_every_row_fits_a_published_name() -> None:
    assert {row.name for row in WAN.few_step} == {row for _, row, _ in PUBLISHED if row}


def test_dmd_is_more_than_a_number_of_steps(tmp_path: Path) -> None:
    remark = said(tmp_path, "FastWan_T2V_14B_480p_lora_rank_64_bf16.safetensors").remark
    assert remark is not None
    assert "1000, 757 and 522" in remark
    assert said(tmp_path, "style.safetensors").remark is None


def test_a_base_of_no_known_family_still_gets_the_steps(tmp_path: Path) -> None:
    for path in ("Qwen-Image-Lightning-4steps-V1.0.safetensors", f"{SEKO}/{HIGH}"):
        assert values(said(tmp_path, path, None)) == STEPS_ONLY


def test_who_says_what(tmp_path: Path) -> None:
    settings = said(tmp_path, f"hf://lightx2v/Wan2.2-Lightning/{SEKO}/{HIGH}").settings
    assert {name: stated.source for name, stated in settings.items()} == {
        "num_inference_steps": "name",
        "guidance_scale": "family",
        "flow_shift": "family",
        "solver": "family",
    }
    assert settings["num_inference_steps"].origin == f"in the name {SEKO}"


# Which names count


def test_a_folder_counts_if_the_file_name_says_nothing(tmp_path: Path) -> None:
    assert values(said(tmp_path, f"{SEKO}/{HIGH}")) == FULL
    assert values(said(tmp_path, f"{SEKO}/pytorch_lora_weights.safetensors")) == FULL
    assert values(said(tmp_path, f"{SEKO}/adapter_model.safetensors")) == FULL
    assert values(said(tmp_path, f"{SEKO}/style.safetensors")) == {}


def test_of_local_folders_only_the_nearest(tmp_path: Path) -> None:
    assert values(said(tmp_path, f"{SEKO}/loras/{HIGH}")) == {}
    assert values(said(tmp_path, f"8steps/{SEKO}/{HIGH}")) == FULL


def test_a_file_given_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SEKO).mkdir()
    monkeypatch.chdir(tmp_path / SEKO)
    adapter = open_lora(Path(HIGH), pair("q"), spec=LoraSpec(HIGH))
    assert values(sampling_of(adapter, WAN)) == FULL


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("hf://me/lightning-4steps/pytorch_lora_weights.safetensors", 4),
        ("hf://me/lightning-4steps/high_noise/model.safetensors", 4),
        ("hf://me/all-4steps/my-8steps/lora.safetensors", 8),
        ("hf://me/all-4steps/style.safetensors", None),
        ("hf://4steps/style/model.safetensors", None),
    ],
)
def test_on_the_hub_every_folder_and_the_repository(tmp_path: Path, path: str, steps: int | None) -> None:
    assert values(said(tmp_path, path)).get("num_inference_steps") == steps


def test_an_adapter_folder_on_the_hub_is_known_by_its_repository(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_lora_weights.safetensors"
    adapter = open_lora(path, pair("q"), spec=LoraSpec("hf://me/my-4steps"))
    assert values(sampling_of(adapter, None)) == STEPS_ONLY


def test_a_name_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    sampling = said(tmp_path, f"caf\udce9-4steps/{HIGH}")
    assert values(sampling) == STEPS_ONLY
    assert sampling.settings["num_inference_steps"].origin == "in the name caf?-4steps"


# Metadata


def test_metadata_beats_the_name_and_what_is_published(tmp_path: Path) -> None:
    metadata = {
        "num_inference_steps": "6",
        "guidance_scale": "1.5",
        "flow_shift": "7",
        "boundary_ratio": "0.9",
        "sample_solver": "UniPC",
    }
    sampling = said(tmp_path, f"{SEKO}/{HIGH}", metadata=metadata)
    assert values(sampling) == {
        "num_inference_steps": 6,
        "guidance_scale": 1.5,
        "flow_shift": 7.0,
        "boundary_ratio": 0.9,
        "solver": "unipc",
    }
    assert {stated.source for stated in sampling.settings.values()} == {"metadata"}
    assert sampling.settings["solver"].origin == f"sample_solver in the metadata of {HIGH}"


@pytest.mark.parametrize(
    "metadata",
    [
        {"num_inference_steps": "four"},
        {"num_inference_steps": "0"},
        {"num_inference_steps": "4.0"},
        {"num_inference_steps": "-4"},
        {"guidance_scale": "nan"},
        {"guidance_scale": "-1"},
        {"guidance_scale": ""},
        {"flow_shift": "0"},
        {"flow_shift": "inf"},
        {"boundary_ratio": "1.5"},
        {"sample_solver": ""},
        {"sample_solver": "{euler}"},
        {"base_schedule": ""},
        {"base_schedule": "1.0"},
        {"base_schedule": "0.0"},
        {"base_schedule": "1.0,0.5"},
        {"base_schedule": "0.5,1.0,0.0"},
        {"base_schedule": "1.0,x,0.0"},
        {"base_schedule": "1.0,,0.0"},
    ],
)
def test_metadata_that_makes_no_sense_says_nothing(tmp_path: Path, metadata: Mapping[str, str]) -> None:
    assert values(said(tmp_path, "x.safetensors", metadata=metadata)) == {}


@pytest.mark.parametrize("metadata", [
    {"ss_steps": "4", "ss_max_train_steps": "2000"},
    {"modelspec.timestep_range": "0,1000", "modelspec.usage_hint": "4 steps"},
    {"format": "fastvideo-lora-v2"},
    {"ss_network_dim": "4", "ss_network_alpha": "1"},
])  # fmt: skip
def test_metadata_of_a_training_says_nothing(tmp_path: Path, metadata: Mapping[str, str]) -> None:
    assert values(said(tmp_path, "x.safetensors", metadata=metadata)) == {}


def test_a_schedule_has_one_level_more_than_steps(tmp_path: Path) -> None:
    sampling = said(tmp_path, "x.safetensors", metadata={"base_schedule": "1.0, 0.75, 0.5, 0.25, 0.0"})
    assert values(sampling) == STEPS_ONLY
    both = {"base_schedule": "1.0,0.5,0.0", "num_inference_steps": "8"}
    assert values(said(tmp_path, "y.safetensors", metadata=both)) == {"num_inference_steps": 8}


@pytest.mark.parametrize("key", ["modelspec.title", "ss_output_name"])
def test_a_name_in_the_metadata_counts_like_the_file_s_own(tmp_path: Path, key: str) -> None:
    renamed = said(tmp_path, "renamed.safetensors", metadata={key: SEKO})
    assert values(renamed) == FULL
    steps = renamed.settings["num_inference_steps"]
    assert (steps.source, steps.origin) == ("metadata", f"{key} in the metadata of renamed.safetensors")


def test_the_file_s_own_name_comes_first(tmp_path: Path) -> None:
    sampling = said(tmp_path, "mine-8steps.safetensors", metadata={"ss_output_name": SEKO})
    assert values(sampling) == {**FULL, "num_inference_steps": 8}
