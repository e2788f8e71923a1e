"""Which LoRA goes onto which component: said by the user or by the keys, never guessed from a name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuselora.lora.adapter import open_adapter
from fuselora.resolve import LoraLocation
from fuselora.specs import parse_lora
from fuselora.synth import write_safetensors
from fuselora.targets import Assigned, assign, expert_in_name, named_component
from tests.inputs import PEFT, one_component, open_base, pair, tensor, two_experts

if TYPE_CHECKING:
    from fuselora.checkpoint import Checkpoint
    from fuselora.lora.adapter import Adapter
    from fuselora.synth import Spec

WAN = [tensor("blocks.0.attn1.to_q.weight", 4, 4), tensor("blocks.0.attn1.to_k.weight", 4, 4)]
PLAIN = pair("blocks.0.attn1.to_q")


def experts(folder: Path) -> Checkpoint:
    return two_experts(folder / "base", WAN)


def single(folder: Path, name: str = "model.safetensors") -> Checkpoint:
    return one_component(folder / "base" / name, WAN)[0]


def loras(folder: Path, *texts: str, specs: list[Spec] = PLAIN) -> list[Adapter]:
    """The files of ``texts`` (``--lora`` options with bare file names), written and opened."""
    found = []
    for text in texts:
        for spec in parse_lora(text, exists=lambda _: False):
            path = write_safetensors(folder / spec.source, specs)
            found.append(open_adapter(LoraLocation(spec, path, path.name, None)))
    return found


def rows(assigned: Assigned) -> list[tuple[int, str, str, float]]:
    return [(a.order, a.adapter.name, a.component.name, a.strength) for a in assigned.assignments]


def refused(assigned: Assigned, kind: str) -> str:
    """The one fault's text and hint."""
    (fault,) = assigned.faults
    assert fault.kind == kind
    return f"{fault.path}: {fault.message}\n{fault.hint}"


# Two experts


def test_one_file_for_no_expert_is_refused_with_three_spellings(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "x.safetensors"), experts(tmp_path))
    text = refused(assigned, "untargeted")
    assert "x.safetensors" in text
    for spelling in (
        "--lora HIGH.safetensors,LOW.safetensors",
        "--lora transformer_2=FILE",
        "--lora all=FILE",
    ):
        assert spelling in text
    assert assigned.assignments == ()


def test_a_name_never_decides(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "high_noise_model.safetensors"), experts(tmp_path))
    refused(assigned, "untargeted")


def test_a_list_gives_each_expert_its_file_and_strength(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "a.safetensors:0.5,b.safetensors:-1"), experts(tmp_path))
    assert rows(assigned) == [
        (0, "a.safetensors", "transformer", 0.5),
        (1, "b.safetensors", "transformer_2", -1.0),
    ]
    assert (assigned.faults, assigned.notices) == ((), ())


def test_named_files_in_any_order(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "low=b.safetensors:2,high=a.safetensors"), experts(tmp_path))
    assert rows(assigned) == [
        (0, "b.safetensors", "transformer_2", 2.0),
        (1, "a.safetensors", "transformer", 1.0),
    ]


@pytest.mark.parametrize(
    ("word", "component"),
    [
        ("transformer", "transformer"),
        ("high", "transformer"),
        ("high_noise", "transformer"),
        ("transformer_2", "transformer_2"),
        ("low", "transformer_2"),
        ("low_noise", "transformer_2"),
    ],
)
def test_one_named_expert(tmp_path: Path, word: str, component: str) -> None:
    assigned = assign(loras(tmp_path, f"{word}=x.safetensors"), experts(tmp_path))
    assert rows(assigned) == [(0, "x.safetensors", component, 1.0)]


def test_all_means_both(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "all=x.safetensors:0.7"), experts(tmp_path))
    assert rows(assigned) == [
        (0, "x.safetensors", "transformer", 0.7),
        (0, "x.safetensors", "transformer_2", 0.7),
    ]


def test_repeated_options_are_summed_in_their_order(tmp_path: Path) -> None:
    texts = ("a.safetensors,b.safetensors", "all=c.safetensors:0.5", "low=d.safetensors")
    assert rows(assign(loras(tmp_path, *texts), experts(tmp_path))) == [
        (0, "a.safetensors", "transformer", 1.0),
        (1, "b.safetensors", "transformer_2", 1.0),
        (2, "c.safetensors", "transformer", 0.5),
        (2, "c.safetensors", "transformer_2", 0.5),
        (3, "d.safetensors", "transformer_2", 1.0),
    ]


def test_a_list_of_three_on_two_experts(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "a.safetensors,b.safetensors,c.safetensors"), experts(tmp_path))
    assert [fault.kind for fault in assigned.faults] == ["list"] * 3
    assert "3 files on a base with 2 experts" in assigned.faults[0].message


def test_all_faults_come_together(tmp_path: Path) -> None:
    assigned = assign(
        loras(tmp_path, "a.safetensors", "unet=b.safetensors", "high=c.safetensors"), experts(tmp_path)
    )
    assert [(fault.kind, fault.path) for fault in assigned.faults] == [
        ("untargeted", "a.safetensors"),
        ("no_component", "b.safetensors"),
    ]
    assert "has only transformer, transformer_2" in assigned.faults[1].message
    assert rows(assigned) == [(2, "c.safetensors", "transformer", 1.0)]


# One transformer


@pytest.mark.parametrize("text", ["x.safetensors", "transformer=x.safetensors", "all=x.safetensors"])
def test_on_one_transformer_a_file_needs_no_target(tmp_path: Path, text: str) -> None:
    assert rows(assign(loras(tmp_path, text), single(tmp_path))) == [(0, "x.safetensors", "transformer", 1.0)]


def test_a_list_on_one_transformer_is_refused(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "a.safetensors,b.safetensors"), single(tmp_path))
    assert [(fault.kind, fault.path) for fault in assigned.faults] == [
        ("list", "a.safetensors"),
        ("list", "b.safetensors"),
    ]
    assert assigned.faults[0].hint is not None
    assert "repeat --lora" in assigned.faults[0].hint


@pytest.mark.parametrize("word", ["transformer_2", "low", "unet"])
def test_a_component_that_the_base_lacks(tmp_path: Path, word: str) -> None:
    assigned = assign(loras(tmp_path, f"{word}=x.safetensors"), single(tmp_path))
    assert "this base has only transformer" in refused(assigned, "no_component")


def test_a_unet_is_a_component(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "base" / "unet" / "model.safetensors", WAN)
    base = open_base(tmp_path / "base")
    for text in ("x.safetensors", "unet=x.safetensors"):
        assert rows(assign(loras(tmp_path, text), base)) == [(0, "x.safetensors", "unet", 1.0)]


# Keys that name a component


def keyed(*prefixes: str) -> list[Spec]:
    return [spec for prefix in prefixes for spec in pair(f"{prefix}blocks.0.attn1.to_q", style=PEFT)]


@pytest.mark.parametrize(
    ("prefixes", "components"),
    [
        (("transformer.", "transformer_2."), ["transformer", "transformer_2"]),
        (("transformer_2.",), ["transformer_2"]),
        (("base_model.model.transformer_2.",), ["transformer_2"]),
        (("base_model.model.transformer.", "transformer_2."), ["transformer", "transformer_2"]),
    ],
)
def test_keys_route_an_untargeted_file(
    tmp_path: Path, prefixes: tuple[str, ...], components: list[str]
) -> None:
    assigned = assign(loras(tmp_path, "x.safetensors:0.5", specs=keyed(*prefixes)), experts(tmp_path))
    assert rows(assigned) == [(0, "x.safetensors", name, 0.5) for name in components]
    assert assigned.faults == ()


@pytest.mark.parametrize(
    "prefixes",
    [
        ("transformer.",),  # what diffusers writes for either expert
        ("diffusion_model.",),
        ("",),
        ("", "transformer_2."),
        ("diffusion_model.", "transformer_2."),
    ],
)
def test_keys_that_do_not_all_name_an_expert_route_nothing(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    assigned = assign(loras(tmp_path, "x.safetensors", specs=keyed(*prefixes)), experts(tmp_path))
    refused(assigned, "untargeted")


def test_all_with_keys_for_both(tmp_path: Path) -> None:
    specs = keyed("transformer.", "transformer_2.")
    assigned = assign(loras(tmp_path, "all=x.safetensors", specs=specs), experts(tmp_path))
    assert [row[2] for row in rows(assigned)] == ["transformer", "transformer_2"]
    assert assigned.faults == ()


@pytest.mark.parametrize(
    ("text", "prefixes"),
    [
        ("high=x.safetensors", ("transformer_2.",)),  # nothing for the target
        ("all=x.safetensors", ("transformer_2.",)),  # nothing for one of the two
        ("high=x.safetensors", ("transformer.", "transformer_2.")),  # half would be left out
        ("low=x.safetensors", ("transformer.", "transformer_2.")),
        ("low=x.safetensors", ("", "transformer_2.")),
    ],
)
def test_keys_for_another_component_are_never_dropped(
    tmp_path: Path, text: str, prefixes: tuple[str, ...]
) -> None:
    assigned = assign(loras(tmp_path, text, specs=keyed(*prefixes)), experts(tmp_path))
    said = refused(assigned, "stray_keys")
    assert "x.safetensors: has keys for transformer" in said
    assert "--lora" in said
    assert assigned.assignments == ()


def test_keys_for_two_experts_on_one_transformer(tmp_path: Path) -> None:
    specs = keyed("transformer.", "transformer_2.")
    said = refused(assign(loras(tmp_path, "x.safetensors", specs=specs), single(tmp_path)), "stray_keys")
    assert "has keys for transformer and transformer_2, and was given for transformer" in said
    assert "split the file" in said


def test_keys_for_the_second_expert_may_go_onto_a_base_of_one(tmp_path: Path) -> None:
    assigned = assign(loras(tmp_path, "x.safetensors", specs=keyed("transformer_2.")), single(tmp_path))
    assert rows(assigned) == [(0, "x.safetensors", "transformer", 1.0)]


@pytest.mark.parametrize(
    ("module", "component"),
    [
        ("transformer_2.q", "transformer_2"),
        ("base_model.model.transformer_2.q", "transformer_2"),
        ("transformer.q", None),
        ("q", None),
        ("transformer_20.q", None),
        ("blocks.transformer_2.q", None),
        ("lora_te1_text_model_q", "lora_te1"),
        ("text_encoder_2.q", "text_encoder_2"),
        ("text_encoders.clip_l.transformer.q", "clip_l"),
        ("text_encoders.other.q", None),
        ("lora_unet_q", None),
    ],
)
def test_named_component(module: str, component: str | None) -> None:
    assert named_component(module) == component


# File names


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("high_noise_model.safetensors", "high"),
        ("low_noise_model.safetensors", "low"),
        ("wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.safetensors", "high"),
        ("Wan2.2-Lightning_I2V-A14B-4steps-lora_LOW_fp16.safetensors", "low"),
        ("Wan_2_2_I2V_A14B_HIGH_lightx2v_4step_lora_v1030_rank_64_bf16.safetensors", "high"),
        ("Wan_2_2_I2V_A14B_LOW_lightx2v_4step_lora_260412_rank_64_fp16.safetensors", "low"),
        ("HighNoise.safetensors", "high"),
        ("lownoise.safetensors", "low"),
        ("wan22-low.safetensors", "low"),
        ("wan22.high.safetensors", "high"),
        ("high", "high"),
        ("low noise.safetensors", "low"),
        ("high_quality_low_noise.safetensors", "low"),
    ],
)
def test_a_name_that_says_an_expert(name: str, expert: str) -> None:
    assert expert_in_name(name) == expert


@pytest.mark.parametrize(
    "name",
    [
        "low_rank.safetensors", "lowrank64.safetensors", "low-rank-a.safetensors", "LowRank.safetensors",
        "highres.safetensors", "high_res.safetensors", "high-resolution.safetensors", "low_vram.safetensors",
        "low-memory.safetensors", "lowstep.safetensors", "low_steps_4.safetensors",
        "high_quality.safetensors", "low_motion.safetensors", "high-detail.safetensors", "high_fps",
        "slow.safetensors", "slow_motion.safetensors", "flow.safetensors", "glow-high_low.safetensors",
        "yellow.safetensors", "highlight.safetensors", "lower.safetensors", "thigh.safetensors",
        "high_and_low.safetensors", "high_noise_low_noise.safetensors", "noise.safetensors", "",
    ],
)  # fmt: skip
def test_a_name_that_says_none(name: str) -> None:
    assert expert_in_name(name) is None


def test_swapped_files_of_a_list_are_refused(tmp_path: Path) -> None:
    texts = "low_noise_model.safetensors,high_noise_model.safetensors"
    assigned = assign(loras(tmp_path, texts), experts(tmp_path))
    assert [(fault.kind, fault.path) for fault in assigned.faults] == [
        ("swapped", "low_noise_model.safetensors"),
        ("swapped", "high_noise_model.safetensors"),
    ]
    first = assigned.faults[0]
    assert "low-noise expert" in first.message and "transformer is the high-noise one" in first.message
    hint = "If this is meant, name the target of each file: --lora COMPONENT=FILE."
    assert {fault.hint for fault in assigned.faults} == {hint}  # said once for both


@pytest.mark.parametrize("texts", ["a.safetensors,high_noise.safetensors", "low.safetensors,b.safetensors"])
def test_one_contradicting_name_is_enough(tmp_path: Path, texts: str) -> None:
    assert [fault.kind for fault in assign(loras(tmp_path, texts), experts(tmp_path)).faults] == ["swapped"]


@pytest.mark.parametrize("text", ["high=low_noise.safetensors", "low_noise=a_HIGH_b.safetensors"])
def test_a_named_target_wins_over_the_name_with_a_warning(tmp_path: Path, text: str) -> None:
    assigned = assign(loras(tmp_path, text), experts(tmp_path))
    assert assigned.faults == ()
    (notice,) = assigned.notices
    assert notice.code == "swapped_name"
    assert notice.facts["lora"] == assigned.assignments[0].adapter.name
    assert "noise expert" in notice.message


@pytest.mark.parametrize(
    "text",
    ["high=high_noise.safetensors", "low=LOW.safetensors", "all=low.safetensors", "high=x.safetensors"],
)
def test_a_fitting_name_is_not_worth_a_word(tmp_path: Path, text: str) -> None:
    assigned = assign(loras(tmp_path, text), experts(tmp_path))
    assert (assigned.faults, assigned.notices) == ((), ())


def test_a_contradicted_route_by_keys_is_refused(tmp_path: Path) -> None:
    assigned = assign(
        loras(tmp_path, "high_noise.safetensors", specs=keyed("transformer_2.")), experts(tmp_path)
    )
    refused(assigned, "swapped")


@pytest.mark.parametrize(
    ("base", "lora", "contradicts"),
    [
        ("wan2.2_t2v_high_noise_14B.safetensors", "low_noise_model.safetensors", True),
        ("wan2.2_t2v_low_noise_14B.safetensors", "HIGH.safetensors", True),
        ("wan2.2_t2v_low_noise_14B.safetensors", "low_noise_model.safetensors", False),
        ("wan2.2_t2v_low_noise_14B.safetensors", "style.safetensors", False),
        ("wan2.1_t2v_14B.safetensors", "low_noise_model.safetensors", False),
        ("low_vram.safetensors", "high_noise_model.safetensors", False),
    ],
)
def test_on_one_file_names_are_compared(tmp_path: Path, base: str, lora: str, contradicts: bool) -> None:
    checkpoint = single(tmp_path, base)
    untargeted = assign(loras(tmp_path, lora), checkpoint)
    named = assign(loras(tmp_path, f"transformer={lora}"), checkpoint)
    assert [fault.kind for fault in untargeted.faults] == ["swapped"] * contradicts
    assert [notice.code for notice in named.notices] == ["swapped_name"] * contradicts
    assert not named.faults and not untargeted.notices
    if contradicts:
        assert base in untargeted.faults[0].message


def test_a_folder_of_one_expert_is_compared_by_its_name(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "low_noise_model" / "model.safetensors", WAN)
    assigned = assign(loras(tmp_path, "high_noise.safetensors"), open_base(tmp_path / "low_noise_model"))
    assert "low_noise_model is the low-noise one" in refused(assigned, "swapped")
