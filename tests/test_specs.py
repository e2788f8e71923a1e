"""The grammar of --lora, --alpha and hf:// addresses, without a file system where one is not the point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuselora.errors import Refused, UsageError
from fuselora.specs import (
    SHORT_NAMES,
    AlphaSpec,
    HubAddress,
    LoraSpec,
    hub_legal,
    local_path,
    parse_alpha,
    parse_hub,
    parse_lora,
)

HUB_FILE = "hf://lightx2v/Wan2.2-Lightning/a/high_noise_model.safetensors"


def parsed(text: str, *existing: str) -> tuple[LoraSpec, ...]:
    return parse_lora(text, exists=lambda name: name in existing)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("x", LoraSpec("x")),
        ("x:0.5", LoraSpec("x", 0.5)),
        ("x:0", LoraSpec("x", 0.0)),
        ("x:-1", LoraSpec("x", -1.0)),
        ("x:+2.5e-1", LoraSpec("x", 0.25)),
        ("x:.5", LoraSpec("x", 0.5)),
        ("x:3.", LoraSpec("x", 3.0)),
        ("transformer=x", LoraSpec("x", 1.0, "transformer")),
        ("high=x:2", LoraSpec("x", 2.0, "transformer")),
        ("high_noise=x", LoraSpec("x", 1.0, "transformer")),
        ("low=x", LoraSpec("x", 1.0, "transformer_2")),
        ("low_noise=x", LoraSpec("x", 1.0, "transformer_2")),
        ("transformer_2=x", LoraSpec("x", 1.0, "transformer_2")),
        ("unet=x", LoraSpec("x", 1.0, "unet")),
        ("all=x:0.7", LoraSpec("x", 0.7, "all")),
        (f"low={HUB_FILE}", LoraSpec(HUB_FILE, 1.0, "transformer_2")),
        (f"{HUB_FILE}@v1.0:0.8", LoraSpec(f"{HUB_FILE}@v1.0", 0.8)),
        ("hf://owner/name:0.8", LoraSpec("hf://owner/name", 0.8)),
        ("hf://owner/name", LoraSpec("hf://owner/name")),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_one_file(text: str, spec: LoraSpec, there: bool) -> None:
    assert parsed(text, *([spec.source] if there else [])) == (spec,)


def test_a_comma_list_is_one_file_per_expert_in_order() -> None:
    assert parsed("a:0.5,b", "a", "b") == (LoraSpec("a", 0.5, None, 0, 2), LoraSpec("b", 1.0, None, 1, 2))


def test_a_list_may_name_a_component_for_each_file() -> None:
    assert parsed("low=b,high=a:2") == (
        LoraSpec("b", 1.0, "transformer_2", 0, 2),
        LoraSpec("a", 2.0, "transformer", 1, 2),
    )


def test_a_list_of_hub_files() -> None:
    first, second = parsed(f"{HUB_FILE}@main:0.5,hf://o/n/low.safetensors")
    assert (first.source, first.strength) == (f"{HUB_FILE}@main", 0.5)
    assert (second.source, second.position, second.listed) == ("hf://o/n/low.safetensors", 1, 2)


@pytest.mark.parametrize(
    "text", ["a,b", "x:0.5", "high=x", "high=a,low=b:2", "hf://a/b", "a:nan", ",", "a,a"]
)
def test_an_existing_name_is_taken_whole(text: str) -> None:
    assert parsed(text, text, "a", "b", "x") == (LoraSpec(text),)


def test_the_longest_run_of_pieces_that_exists_is_one_file() -> None:
    assert [spec.source for spec in parsed("a,b,c", "a", "a,b", "b", "c")] == ["a,b", "c"]
    assert parsed("high=a,b:0.5,low=c", "a", "b", "a,b", "c") == (
        LoraSpec("a,b", 0.5, "transformer", 0, 2),
        LoraSpec("c", 1.0, "transformer_2", 1, 2),
    )
    assert parsed("all=a,b:2", "a,b") == (LoraSpec("a,b", 2.0, "all"),)


def test_as_little_as_possible_is_taken_off_an_existing_name() -> None:
    assert parsed("low=x:2:3", "low=x:2", "x:2", "x") == (LoraSpec("low=x:2", 3.0),)
    assert parsed("low=x:2:3", "x:2", "x") == (LoraSpec("x:2", 3.0, "transformer_2"),)


@pytest.mark.parametrize("text", ["x:0.8x", "x:", "x:1_0", "x:0x10", "x: 1", "x:1 ", "x:1.2.3", "x:٣"])
def test_what_is_no_number_stays_part_of_the_name(text: str) -> None:
    assert parsed(text, "x") == (LoraSpec(text),)


@pytest.mark.parametrize("strength", ["nan", "inf", "-inf", "+Infinity", "NaN", "1e999"])
@pytest.mark.parametrize("existing", [(), ("x",)])
def test_a_strength_has_to_be_finite(strength: str, existing: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="not a finite number"):
        parsed(f"x:{strength}", *existing)


@pytest.mark.parametrize("text", ["", "a,,b", "a,", ",a", ",", "high=", "high=,low=b", ":0.5", "low=:0.5"])
def test_an_item_without_a_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"no file|without a file"):
        parsed(text, "a", "b")


@pytest.mark.parametrize("text", ["transformer=a,b", "a,low=b", "high=a,b,low=c"])
def test_a_component_for_only_some_files_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="for some files") as caught:
        parsed(text, "a", "b", "c")
    assert "high=FILE,low=FILE" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["high=a,transformer=b", "all=a,low=b", "low=a,high=b,low_noise=c"])
def test_two_files_for_one_component_are_no_list(text: str) -> None:
    with pytest.raises(UsageError, match="two files") as caught:
        parsed(text)
    assert "repeat --lora" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["x,x", "x:1,x:0.5", "x,y,x"])
def test_the_same_file_twice_is_refused_with_the_spelling_for_both(text: str) -> None:
    with pytest.raises(Refused, match="twice") as caught:
        parsed(text, "x", "y")
    assert caught.value.faults[0].key == "x"
    assert "all=x" in str(caught.value.hint)


def test_the_same_file_for_each_component_by_name_is_said_on_purpose() -> None:
    assert [spec.component for spec in parsed("high=x:1,low=x:0.5")] == ["transformer", "transformer_2"]


@pytest.mark.parametrize("text", ["hgih=x", "High=x:0.5", "hgih=hf://o/n/f.safetensors"])
def test_an_unknown_component_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="is not a component") as caught:
        parsed(text, "x")
    assert "high_noise" in str(caught.value.hint)


def test_an_equals_sign_in_a_missing_name_is_left_to_the_missing_file() -> None:
    assert parsed("rank=64/x") == (LoraSpec("rank=64/x"),)


ODD_NAMES = [
    "two words.safetensors",
    "ünï.safetensors",
    "模型.safetensors",
    "v1.2..final.safetensors",
    "-x.safetensors",
    "a#b.safetensors",
    "n" * 188 + ".safetensors",
    os.fsdecode(b"caf\xe9.safetensors"),
    "a,b.safetensors",
    "a:0.5",
    "high=a.safetensors",
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_B53_odd_names_are_found_as_they_are(  # noqa: N802
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    (tmp_path / "other").touch()
    monkeypatch.chdir(tmp_path)
    assert parse_lora(name) == (LoraSpec(name),)
    assert parse_lora(f"low={tmp_path / name}:0.5") == (LoraSpec(str(tmp_path / name), 0.5, "transformer_2"),)
    assert [spec.source for spec in parse_lora(f"{name},other")] == [name, "other"]


def test_B53_a_home_folder_is_found_after_a_component(  # noqa: N802
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a,b").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_lora("high=~/a,b") == (LoraSpec("~/a,b", 1.0, "transformer"),)
    assert local_path("~/a,b") == tmp_path / "a,b"


@pytest.mark.parametrize("text", ["", "x" * 5000, "a\0b", "~nobody-of-this-name/x", "no/such"])
def test_impossible_paths_do_not_exist(text: str) -> None:
    assert local_path(text) is None


@given(
    st.text(alphabet="ab,:=.01/hightransform_2 -", max_size=24), st.sets(st.sampled_from(["a", "b", "a,b"]))
)
def test_every_text_is_read_or_refused(text: str, existing: set[str]) -> None:
    try:
        specs = parsed(text, *existing)
    except (UsageError, Refused):
        return
    assert all(spec.source for spec in specs)
    assert [spec.position for spec in specs] == list(range(len(specs)))
    assert {spec.listed for spec in specs} == {len(specs)}


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("8", AlphaSpec(8.0)),
        ("0.5", AlphaSpec(0.5)),
        ("-4", AlphaSpec(-4.0)),
        ("x=16", AlphaSpec(16.0, "x")),
        ("a=b=16", AlphaSpec(16.0, "a=b")),
        ("hf://o/n/f.safetensors@r=1e2", AlphaSpec(100.0, "hf://o/n/f.safetensors@r")),
    ],
)
def test_alpha(text: str, spec: AlphaSpec) -> None:
    assert parse_alpha(text) == spec


@pytest.mark.parametrize("text", ["", "x", "x=", "=8", "nan", "inf", "1e999", "8,16", "x=8 "])
def test_alpha_has_to_be_one_finite_number(text: str) -> None:
    with pytest.raises(UsageError):
        parse_alpha(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf://o/n", HubAddress("o/n")),
        ("hf://o/n/", HubAddress("o/n")),
        ("hf://o/n@v1", HubAddress("o/n", "", "v1")),
        ("hf://o/n@refs/pr/3", HubAddress("o/n", "", "refs/pr/3")),
        ("hf://o/n@refs/pr/3/f.safetensors", HubAddress("o/n", "f.safetensors", "refs/pr/3")),
        ("hf://o/n@feature%2Fx/f.safetensors", HubAddress("o/n", "f.safetensors", "feature/x")),
        ("hf://o/n/a/f.safetensors", HubAddress("o/n", "a/f.safetensors")),
        ("hf://o/n/a/f.safetensors@v1", HubAddress("o/n", "a/f.safetensors", "v1")),
        ("hf://o/n/f.safetensors@refs/pr/3", HubAddress("o/n", "f.safetensors", "refs/pr/3")),
        ("hf://o/n/f@2.safetensors", HubAddress("o/n", "f@2.safetensors")),
        ("hf://o/n@v1/f@2.safetensors", HubAddress("o/n", "f@2.safetensors", "v1")),
    ],
)
def test_hub_addresses(text: str, address: HubAddress) -> None:
    assert parse_hub(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://o",
        "hf://o/",
        "hf:///n",
        "hf://o/n@",
        "hf://o/n/f@",
        "hf://o--p/n",
        "hf://o/n/../x",
        "o/n",
    ],
)
def test_what_is_no_hub_address(text: str) -> None:
    with pytest.raises(UsageError, match="no Hub address"):
        parse_hub(text)


def test_a_hub_source_names_its_place_in_the_repository() -> None:
    assert HubAddress("o/n", "a/b", "v1").source == "o/n/a/b"
    assert HubAddress("o/n").source == "o/n"


def test_short_names_stand_for_repositories() -> None:
    assert SHORT_NAMES["Wan2.2"] == "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    assert SHORT_NAMES["Wan2.2-TI2V"] == "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    assert all(hub_legal(repo) for repo in SHORT_NAMES.values())
    assert not any("/" in name for name in SHORT_NAMES)
    assert len({name.lower() for name in SHORT_NAMES}) == len(SHORT_NAMES)


@pytest.mark.parametrize(
    ("short", "repository"),
    [
        ("Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2509"),
        ("FLUX.1-Kontext", "black-forest-labs/FLUX.1-Kontext-dev"),
        ("FLUX.2-dev", "black-forest-labs/FLUX.2-dev"),
        ("SD3.5", "stabilityai/stable-diffusion-3.5-large"),
        ("SDXL", "stabilityai/stable-diffusion-xl-base-1.0"),
        ("HunyuanVideo", "hunyuanvideo-community/HunyuanVideo"),
        ("LTX-2", "Lightricks/LTX-2"),
        ("MiniMax-H3", "MiniMaxAI/MiniMax-H3"),
    ],
)
def test_a_short_name_is_a_repository_in_diffusers_layout(short: str, repository: str) -> None:
    assert SHORT_NAMES[short] == repository


@pytest.mark.parametrize("text", ["o/n", "a.b/c_d-e", "1/2"])
def test_hub_legal(text: str) -> None:
    assert hub_legal(text)


@pytest.mark.parametrize(
    "text", ["o", "o/n/p", "./n", "o/", "/n", "o/n.git", "o/a--b", "o/a..b", "ö/n", "o/n m", "o/-n", "~/n"]
)
def test_hub_illegal(text: str) -> None:
    assert not hub_legal(text)


def test_the_grammar_needs_only_the_standard_library() -> None:
    code = "import sys, fuselora.specs; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    foreign = set(run.stdout.split()) & {"torch", "huggingface_hub", "safetensors", "rich", "typer", "numpy"}
    assert not foreign
