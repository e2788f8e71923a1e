"""How the result is meant to be sampled: only what is stated, for both experts, and by nobody otherwise."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fuselora import synth
from fuselora.describe import describe
from fuselora.families import Kin
from fuselora.families.wan import WAN
from fuselora.marker import FILE_NAME, decode, encode, read_marker
from fuselora.pipeline import merge, plan
from fuselora.report import Reporter
from fuselora.serving_notes import NOTHING, sentence, serving_notes, vllm_omni
from fuselora.summary import plan_document, report_document
from tests.fused_pair import edit_json, edit_marker
from tests.inputs import matched, open_base, open_lora, pair, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fuselora.match import Matching
    from fuselora.planning import FusePlan

SIZE = synth.tiny("wan2.2-t2v-a14b", blocks=1)
SEKO = "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1"
FULL = {
    "num_inference_steps": 4,
    "guidance_scale": 1.0,
    "guidance_scale_2": 1.0,
    "flow_shift": 5.0,
    "boundary_ratio": 0.875,
    "solver": "euler",
}


@dataclass(frozen=True)
class Inputs:
    """A tiny Wan2.2 pair, and a LoRA for each expert under any name."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    def lora(self, name: str, *, seed: int = 1, **metadata: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        return synth.write_lora(path, SIZE, style="lightning", alpha=4, seed=seed, metadata=metadata)

    def pair(self, high: str, low: str) -> list[str]:
        return [f"{self.lora(high)},{self.lora(low, seed=2)}"]

    def seko(self) -> list[str]:
        return self.pair(f"{SEKO}/high_noise_model.safetensors", f"{SEKO}/low_noise_model.safetensors")

    def plan(self, loras: Sequence[str], **options: Any) -> FusePlan:
        return plan(self.base, loras, **options)


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    synth.write_pipeline(tmp_path / "base", SIZE, experts=True, dtype="BF16")
    return Inputs(tmp_path)


def values(planned: FusePlan) -> dict[str, Any]:
    return {name: stated.value for name, stated in planned.serving.settings.items()}


def said(planned: FusePlan, code: str) -> list[str]:
    return [notice.message for notice in planned.notices if notice.code == code]


# One base, one LoRA for each expert


def test_the_pair_of_wan22_lightning(inputs: Inputs) -> None:
    planned = inputs.plan(inputs.seko())
    assert values(planned) == FULL
    assert not planned.notices
    assert planned.serving.document()["sources"] == {
        "num_inference_steps": "name",
        "guidance_scale": "family",
        "guidance_scale_2": "family",
        "flow_shift": "family",
        "boundary_ratio": "base",
        "solver": "family",
    }


def test_plain_names_say_nothing_and_the_base_alone_is_no_reason_for_a_note(inputs: Inputs) -> None:
    planned = inputs.plan(inputs.pair("high.safetensors", "low.safetensors"))
    assert planned.serving == NOTHING
    assert planned.serving.document() == {}


def test_an_unlisted_few_step_lora_is_not_given_the_shift_of_its_many_step_base(inputs: Inputs) -> None:
    planned = inputs.plan(inputs.pair("a-high-8steps.safetensors", "a-low-8steps.safetensors"))
    assert values(planned) == {"num_inference_steps": 8, "boundary_ratio": 0.875}
    assert planned.serving.settings["boundary_ratio"].origin == "in model_index.json"
    assert planned.serving.unknown == ("guidance", "flow shift", "solver")
    last = "not known, see where the LoRA is from: guidance, flow shift, solver"
    assert planned.serving.reasons()[-1] == last
    assert str(planned.serving.document()["note"]).endswith(last)


def test_a_listed_lora_beside_an_unlisted_one_of_as_many_steps(inputs: Inputs) -> None:
    planned = inputs.plan(inputs.pair(f"{SEKO}/high_noise_model.safetensors", "my-low-4steps.safetensors"))
    assert values(planned) == {"num_inference_steps": 4, "guidance_scale": 1.0, "boundary_ratio": 0.875}
    assert planned.serving.unknown == ("guidance on transformer_2", "flow shift", "solver")
    (message,) = said(planned, "serving_one_sided")
    assert "sampled with flow shift 5.0, euler solver" in message
    assert planned.notices[0].facts["components"] == ["transformer_2"]


def test_a_lora_that_says_nothing_does_not_matter(inputs: Inputs) -> None:
    style = inputs.lora("style.safetensors", seed=3)
    planned = inputs.plan([*inputs.seko(), f"all={style}:0.3"])
    assert (values(planned), planned.notices) == (FULL, ())


def test_the_strength_does_not_matter_unless_nothing_is_added(inputs: Inputs) -> None:
    high, low = inputs.pair("x-4steps-high.safetensors", "x-4steps-low.safetensors")[0].split(",")
    assert values(inputs.plan([f"{high}:0.5,{low}:1.5"]))["num_inference_steps"] == 4
    for strength in ("0", "-1"):
        assert inputs.plan([f"{high}:{strength},{low}:{strength}"]).serving == NOTHING


def test_a_lora_that_is_left_out_whole_does_not_matter(inputs: Inputs) -> None:
    loras = inputs.pair("x-4steps-high.safetensors", "x-4steps-low.safetensors")
    assert inputs.plan(loras, blocks=["*=0"]).serving == NOTHING
    assert inputs.plan(loras, blocks=["*.ffn.*=0"]).serving != NOTHING
    fused = merge(inputs.base, loras, inputs.folder / "fused", blocks=["*=0"]).out
    edit_marker(fused, lambda document: document.update(serving={}))
    assert plan(fused, [f"all={inputs.lora('style.safetensors', seed=3)}"], stack=True).serving == NOTHING


def test_two_loras_that_disagree_leave_the_setting_out(inputs: Inputs) -> None:
    other = inputs.lora("other-8steps.safetensors", seed=3)
    planned = inputs.plan([*inputs.seko(), f"all={other}"])
    assert values(planned) == {n: v for n, v in FULL.items() if n != "num_inference_steps"}
    (message,) = said(planned, "serving_disagrees")
    assert f"4 steps (in the name {SEKO})" in message
    assert "8 steps (in the name other-8steps.safetensors)" in message
    (notice,) = planned.notices
    assert notice.facts == {"setting": "num_inference_steps", "values": [4, 8]}


def test_a_setting_that_is_left_out_is_not_taken_from_the_base(inputs: Inputs) -> None:
    high = inputs.lora("high.safetensors", flow_shift="5", num_inference_steps="4")
    low = inputs.lora("low.safetensors", seed=2, flow_shift="7", num_inference_steps="4")
    planned = inputs.plan([f"{high},{low}"])
    assert values(planned) == {"num_inference_steps": 4, "boundary_ratio": 0.875}


def test_a_few_step_lora_for_one_expert_alone(inputs: Inputs) -> None:
    high = inputs.seko()[0].split(",")[0]
    planned = inputs.plan([f"high={high}"])
    assert values(planned) == {"guidance_scale": 1.0, "boundary_ratio": 0.875}
    (message,) = said(planned, "serving_one_sided")
    assert "sampled with 4 steps, flow shift 5.0, euler solver" in message
    assert "nothing says so of transformer_2" in message
    assert planned.notices[0].facts["components"] == ["transformer_2"]


def test_what_one_expert_alone_says_beside_the_steps_is_left_out_with_a_notice(inputs: Inputs) -> None:
    high = inputs.seko()[0].split(",")[0]
    other = inputs.lora("lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors", seed=3)
    planned = inputs.plan([f"{high},{other}"])
    assert values(planned) == {name: value for name, value in FULL.items() if name != "solver"}
    (message,) = said(planned, "serving_one_sided")
    assert message.startswith("only one expert gets a LoRA that is sampled with euler solver (published for ")
    assert planned.notices[0].facts == {"settings": {"solver": "euler"}, "components": ["transformer_2"]}


def test_a_flow_shift_of_one_expert_alone_is_noted_if_the_base_says_the_same(inputs: Inputs) -> None:
    for shift, notes, left_out in (("3", {"flow_shift": 3.0}, []), ("5", {}, [5.0])):
        high = inputs.lora("high.safetensors", flow_shift=shift, guidance_scale="1")
        planned = inputs.plan([f"high={high}"])
        assert values(planned) == {"guidance_scale": 1.0, "boundary_ratio": 0.875, **notes}
        assert [notice.facts["settings"] for notice in planned.notices] == [
            {"flow_shift": value} for value in left_out
        ]


def test_each_expert_can_say_what_the_other_does_not(inputs: Inputs) -> None:
    high = inputs.lora("high.safetensors", flow_shift="5")
    low = inputs.lora("low.safetensors", seed=2, num_inference_steps="4")
    planned = inputs.plan([f"{high},{low}"])
    assert values(planned) == {"boundary_ratio": 0.875}
    assert [notice.facts for notice in planned.notices] == [
        {"settings": {"num_inference_steps": 4}, "components": ["transformer"]},
        {"settings": {"flow_shift": 5.0}, "components": ["transformer_2"]},
    ]


def test_guidance_is_each_expert_s_own(inputs: Inputs) -> None:
    high = inputs.lora("high.safetensors", guidance_scale="3.5")
    low = inputs.lora("low.safetensors", seed=2, guidance_scale="1")
    planned = inputs.plan([f"{high},{low}"])
    assert not planned.notices
    assert (values(planned)["guidance_scale"], values(planned)["guidance_scale_2"]) == (3.5, 1.0)
    second = inputs.plan([f"low={low}"])
    assert values(second) == {"guidance_scale_2": 1.0, "boundary_ratio": 0.875}
    assert second.serving.unknown == ("steps", "guidance on transformer", "flow shift", "solver")


def test_the_lora_s_metadata_beats_the_base(inputs: Inputs) -> None:
    high = inputs.lora("high.safetensors", boundary_ratio="0.5")
    assert values(inputs.plan([f"high={high}"])) == {"boundary_ratio": 0.5}


# Other bases


def test_files_of_the_base_that_say_nothing_useful(inputs: Inputs) -> None:
    loras = inputs.seko()
    (inputs.base / "scheduler" / "scheduler_config.json").write_text("not JSON")
    edit_json(inputs.base / "model_index.json", lambda document: document.update(boundary_ratio=True))
    assert values(inputs.plan(loras)) == {n: v for n, v in FULL.items() if n != "boundary_ratio"}
    shutil.rmtree(inputs.base / "scheduler")
    (inputs.base / "model_index.json").unlink()
    assert values(inputs.plan(loras)) == {n: v for n, v in FULL.items() if n != "boundary_ratio"}


def test_one_transformer_has_one_guidance_and_no_boundary(tmp_path: Path) -> None:
    size = synth.tiny("wan2.1-t2v-14b", blocks=1)
    base = synth.write_pipeline(tmp_path / "base", size, dtype="BF16")
    edit_json(base / "model_index.json", lambda document: document.update(boundary_ratio=0.9))
    lora = synth.write_lora(tmp_path / "wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors", size)
    planned = plan(base, [lora])
    assert values(planned) == {"num_inference_steps": 4, "guidance_scale": 1.0, "flow_shift": 5.0}
    assert planned.serving.unknown == ("solver",)


def native_pair(folder: Path) -> tuple[Path, list[Matching]]:
    base = synth.write_native(folder / "native", SIZE, experts=True, dtype="BF16")
    checkpoint = open_base(base)
    found = []
    for component in checkpoint.components:
        path = folder / f"{component.role}-4steps.safetensors"
        lora = open_lora(path, pair("blocks.0.self_attn.q", SIZE.dim, SIZE.dim))
        found.append(matched(lora, checkpoint, component))
    assert all(matching.hits for matching in found)
    return base, found


def test_a_native_base_has_the_boundary_of_the_published_model(tmp_path: Path) -> None:
    base, matchings = native_pair(tmp_path)
    assert {*serving_notes(open_base(base), matchings).settings} == {"num_inference_steps"}
    kin = Kin((), ("Wan2.2-I2V-A14B",), 1, {"patch_embedding.weight": (SIZE.dim, 16, -1, -1, -1)})
    checkpoint = replace(open_base(base), family=replace(WAN, kin=(kin,)), models=kin.named(2))
    stated = serving_notes(checkpoint, matchings).settings["boundary_ratio"]
    assert (stated.value, stated.source, stated.origin) == (0.9, "family", "published for Wan2.2-I2V-A14B")


def test_the_pipeline_that_goes_with_a_native_base(inputs: Inputs, tmp_path: Path) -> None:
    base, matchings = native_pair(tmp_path)
    settings = serving_notes(open_base(base), matchings, pipeline=inputs.base).settings
    assert {name: stated.value for name, stated in settings.items()} == {
        "num_inference_steps": 4,
        "boundary_ratio": 0.875,
    }


def test_a_skeleton_is_that_pipeline(inputs: Inputs) -> None:
    native = synth.write_native(inputs.folder / "native", SIZE, experts=True, dtype="BF16")
    planned = plan(native, inputs.seko(), layout="diffusers", skeleton=str(inputs.base))
    assert values(planned) == FULL
    assert values(plan(native, inputs.seko())) == {n: v for n, v in FULL.items() if n != "boundary_ratio"}


def test_boundaries_are_of_models_with_two_experts() -> None:
    assert {*WAN.boundary_ratios} == {model for kin in WAN.kin for model in kin.expert_of}


def test_a_base_of_no_known_family(tmp_path: Path) -> None:
    base = synth.write_safetensors(tmp_path / "b.safetensors", [tensor("q.weight", 4, 4)])
    lora = synth.write_safetensors(tmp_path / "Qwen-Image-Lightning-8steps-V2.0.safetensors", pair("q"))
    assert values(plan(base, [lora])) == {"num_inference_steps": 8}


# A base that is fused already


def test_stacking_keeps_what_the_base_s_marker_notes(inputs: Inputs) -> None:
    fused = merge(inputs.base, inputs.seko(), inputs.folder / "fused").out
    style = inputs.lora("style.safetensors", seed=3)
    stacked = plan(fused, [f"all={style}"], stack=True)
    assert values(stacked) == FULL
    assert stacked.serving.settings["num_inference_steps"].source == "base"
    other = inputs.lora("other-8steps.safetensors", seed=4)
    (message,) = said(plan(fused, [f"all={other}"], stack=True), "serving_disagrees")
    assert "4 steps (in fused.json of the base)" in message


def test_experts_that_are_fused_one_after_the_other(inputs: Inputs) -> None:
    high, low = inputs.pair("x-high-4steps.safetensors", "x-low-4steps.safetensors")[0].split(",")
    fused = merge(inputs.base, [f"high={high}"], inputs.folder / "fused").out
    assert values(plan(fused, [f"low={low}"], stack=True))["num_inference_steps"] == 4


def test_a_marker_that_was_edited_is_not_believed_blindly(inputs: Inputs) -> None:
    fused = merge(inputs.base, inputs.seko(), inputs.folder / "fused").out
    wrong = {"num_inference_steps": "many", "guidance_scale": True, "flow_shift": [1], "solver": "euler"}
    edit_marker(fused, lambda document: document.update(serving=wrong))
    style = inputs.lora("style.safetensors", seed=3)
    found = values(plan(fused, [f"all={style}"], stack=True))
    assert found == {"solver": "euler", "boundary_ratio": 0.875}


# In words


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (FULL, "4 steps, guidance 1.0, flow shift 5.0, boundary ratio 0.875, euler solver"),
        (
            {"guidance_scale": 3.5, "guidance_scale_2": 1.0},
            "guidance 3.5 on transformer, guidance 1.0 on transformer_2",
        ),
        ({"guidance_scale_2": 1.0}, "guidance 1.0 on transformer_2"),
        ({"guidance_scale": 1.0, "boundary_ratio": 0.9}, "guidance 1.0 on transformer, boundary ratio 0.9"),
        ({"guidance_scale": 1}, "guidance 1"),
        ({"num_inference_steps": [4], "solver": None, "flow_shift": True, "note": "x", "else": 1}, ""),
        ({}, ""),
    ],
)
def test_a_document_as_a_sentence(document: Mapping[str, object], words: str) -> None:
    assert sentence(document) == words


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        (
            FULL,
            (
                "vllm serve out --omni --boundary-ratio 0.875 --flow-shift 5.0",
                'each request: {"num_inference_steps": 4, "guidance_scale": 1.0, "guidance_scale_2": 1.0, '
                '"extra_params": {"sample_solver": "euler"}}',
            ),
        ),
        ({"num_inference_steps": 8}, ("vllm serve out --omni", 'each request: {"num_inference_steps": 8}')),
        ({"boundary_ratio": 0.9}, ("vllm serve out --omni --boundary-ratio 0.9",)),
        ({"flow_shift": 5.0, "solver": "dpm++"}, ("vllm serve out --omni --flow-shift 5.0",)),
        ({"num_inference_steps": [4], "boundary_ratio": True, "note": "x", "sources": {}}, ()),
        ({}, ()),
    ],
)
def test_a_document_as_vllm_omni_takes_it(document: Mapping[str, object], lines: tuple[str, ...]) -> None:
    assert vllm_omni(document, "out") == lines


def test_the_folder_in_the_command_is_quoted() -> None:
    (command, _) = vllm_omni(FULL, "a b")
    assert command.startswith("vllm serve 'a b' --omni ")


def test_each_origin_is_said_once(inputs: Inputs) -> None:
    notes = inputs.plan(inputs.seko()).serving
    assert notes.reasons() == (
        f"4 steps: in the name {SEKO}",
        "guidance 1.0, flow shift 5.0, euler solver: "
        "published for Wan2.2-Lightning (ModelTC/Wan2.2-Lightning)",
        "boundary ratio 0.875: in model_index.json",
    )
    assert notes.document()["note"] == "; ".join(notes.reasons())


def test_remarks_are_said_once(tmp_path: Path) -> None:
    size = synth.tiny("wan2.1-t2v-14b", blocks=1)
    base = synth.write_pipeline(tmp_path / "base", size, dtype="BF16")
    lora = synth.write_lora(tmp_path / "FastWan_T2V_14B_480p_lora_rank_64_bf16.safetensors", size)
    again = synth.write_lora(tmp_path / "FastWan_T2V_14B_480p_lora_rank_16_bf16.safetensors", size, seed=2)
    notes = plan(base, [lora, again]).serving
    published, remark, unknown = notes.reasons()
    assert published.startswith("3 steps, guidance 1.0, flow shift 8.0: ")
    assert remark.startswith("the timesteps are 1000, 757 and 522")
    assert unknown == "not known, see where the LoRA is from: solver"


# Marker, JSON and report


def test_the_marker_and_its_schema(inputs: Inputs) -> None:
    merged = merge(inputs.base, inputs.seko(), inputs.folder / "out")
    document = json.loads((merged.out / FILE_NAME).read_bytes())
    schema = json.loads(files("fuselora").joinpath("schema", "fused-1.0.schema.json").read_text("utf-8"))
    marker = read_marker(merged.out)
    assert marker is not None
    assert {**marker.serving} == {**FULL, "note": document["serving"]["note"]}
    assert document["serving"] == merged.plan.serving.document() == report_document(merged)["serving"]
    for name in (*FULL, "sources", "note"):
        assert name in schema["properties"]["serving"]["properties"]


def test_without_notes_there_is_no_field(inputs: Inputs) -> None:
    merged = merge(inputs.base, inputs.pair("high.safetensors", "low.safetensors"), inputs.folder / "out")
    assert "serving" not in merged.marker.raw
    assert merged.marker.serving == {}
    assert report_document(merged)["serving"] is plan_document(merged.plan)["serving"] is None


def test_a_warning_about_sampling_is_in_the_marker(inputs: Inputs) -> None:
    high = inputs.seko()[0].split(",")[0]
    merged = merge(inputs.base, [f"high={high}"], inputs.folder / "out")
    warnings = merged.marker.raw["warnings"]
    assert isinstance(warnings, list)
    assert [warning["code"] for warning in warnings] == ["serving_one_sided"]
    assert warnings[0]["components"] == ["transformer_2"]


@pytest.mark.parametrize("serving", [None, 4, [], "4 steps"])
def test_a_serving_that_is_no_object_is_none(inputs: Inputs, serving: object) -> None:
    merged = merge(inputs.base, inputs.seko(), inputs.folder / "out")
    assert decode(encode({**merged.marker.raw, "serving": serving})).serving == {}


def test_the_fingerprint_and_the_weights_do_not_depend_on_the_notes(inputs: Inputs) -> None:
    plain = merge(inputs.base, inputs.pair("high.safetensors", "low.safetensors"), inputs.folder / "plain")
    noted = merge(inputs.base, inputs.seko(), inputs.folder / "noted")
    assert noted.marker.serving
    assert not plain.marker.serving
    assert plain.marker.fingerprint == noted.marker.fingerprint
    assert plain.marker.artifact == noted.marker.artifact


def test_plan_and_merge_print_it_last(inputs: Inputs, capsys: pytest.CaptureFixture[str]) -> None:
    loras = inputs.seko()
    merged = merge(inputs.base, loras, inputs.folder / "out")
    Reporter().merged(merged)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("To serve: 4 steps, guidance 1.0, flow shift 5.0, boundary ratio 0.875, euler solver")
    assert lines[at - 1].startswith("Wrote ")
    assert lines[at + 1 :] == [
        *(f"  {reason}" for reason in merged.plan.serving.reasons()),
        "vLLM-Omni takes none of this from the folder:",
        *(f"  {line}" for line in vllm_omni(FULL, str(merged.out))),
    ]
    Reporter().plan(inputs.plan(loras))
    assert capsys.readouterr().out.count("To serve: 4 steps") == 1


def test_what_vllm_omni_does_not_load_is_not_served_with_it(
    inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    native = synth.write_native(inputs.folder / "native", SIZE, experts=True, dtype="BF16")
    bare = merge(inputs.base, inputs.seko(), inputs.folder / "bare", assets="skip")
    layout, skeleton = "diffusers", str(inputs.base)
    made = merge(native, inputs.seko(), inputs.folder / "made", layout=layout, skeleton=skeleton)
    for merged in (merge(native, inputs.seko(), inputs.folder / "out"), bare, made):
        Reporter().merged(merged)
        said = capsys.readouterr().out
        assert "To serve: 4 steps" in said
        assert ("vllm serve" in said) is (merged is made)


def test_nothing_is_printed_where_nothing_is_known(
    inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    Reporter().plan(inputs.plan(inputs.pair("high.safetensors", "low.safetensors")))
    assert "serve" not in capsys.readouterr().out


def test_inspect_tells_of_a_lora_and_of_a_fused_folder(inputs: Inputs) -> None:
    loras = inputs.seko()
    lora = describe(Path(loras[0].split(",")[0]))
    assert [text for name, text in lora.rows() if name == "to serve"] == [
        f"4 steps: in the name {SEKO}",
        "guidance 1.0, flow shift 5.0, euler solver: "
        "published for Wan2.2-Lightning (ModelTC/Wan2.2-Lightning)",
    ]
    document: Any = lora.document()
    assert document["serving"]["num_inference_steps"] == 4
    fused = describe(merge(inputs.base, loras, inputs.folder / "out").out)
    assert dict(fused.rows())["to serve"] == sentence(FULL)
    plain = describe(inputs.lora("plain.safetensors"))
    assert plain.document()["serving"] is None
    assert "to serve" not in dict(plain.rows())
