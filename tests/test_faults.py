"""What refuses a run before any weight is read, and what is only said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuselora.errors import Fault, Refused
from fuselora.families import Family
from fuselora.faults import Checked, check
from fuselora.marker import FINGERPRINT_KEY, encode
from fuselora.match import match
from fuselora.misses import ALLOWED, ZERO_VALUED, is_zero
from fuselora.specs import AlphaSpec, LoraSpec, Request
from fuselora.synth import Spec, write_safetensors
from fuselora.targets import assign
from tests.inputs import PEFT, matched, one_component, open_base, open_lora, pair, tensor, two_experts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuselora.checkpoint import Checkpoint
    from fuselora.lora.adapter import Adapter

Q, K = "blocks.0.attn1.to_q", "blocks.0.attn1.to_k"
BASE = [tensor(f"{Q}.weight", 4, 4), tensor(f"{K}.weight", 4, 4)]


def asked(**options: object) -> Request:
    return Request(base="base", loras=(), **options)  # type: ignore[arg-type]


def checked(base: Checkpoint, *adapters: Adapter, **options: object) -> Checked:
    """Every LoRA on every component."""
    assigned = assign(adapters, base)
    matchings = [match(a, base.family, base.layout) for a in assigned.assignments]
    return check(base, matchings, asked(**options))


def on(
    folder: Path,
    base: Sequence[Spec],
    lora: Sequence[Spec],
    metadata: dict[str, str] | None = None,
    **options: object,
) -> Checked:
    checkpoint, _ = one_component(folder / "base.safetensors", base)
    return checked(checkpoint, open_lora(folder / "x.safetensors", lora, metadata=metadata), **options)


def said(found: Checked) -> list[tuple[str, str | None]]:
    return [(fault.kind, fault.key) for fault in found.faults]


def codes(found: Checked) -> list[str]:
    return [notice.code for notice in found.notices]


def only(faults: Sequence[Fault]) -> Fault:
    (fault,) = faults
    return fault


def test_a_fitting_lora_passes(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, pair(Q))
    assert (found.faults, found.notices) == ((), ())
    assert [hit.base_key for hit in found.matchings[0].hits] == [f"{Q}.weight"]


# Alpha


def alphas(found: Checked) -> list[tuple[float, str]]:
    return [(hit.alpha.value, hit.alpha.source) for hit in found.matchings[0].hits if hit.alpha]


def test_each_pair_has_its_alpha_and_no_difference_has_one(tmp_path: Path) -> None:
    lora = [*pair(Q, alpha=8), *pair(K), tensor(f"{Q}.diff", 4, 4)]
    found = on(tmp_path, BASE, lora, {"alpha": "16"})
    assert sorted(alphas(found)) == [(8.0, "tensor"), (16.0, "metadata")]
    assert [hit.alpha for hit in found.matchings[0].hits if hit.kind.name == "diff"] == [None]


def test_no_alpha_anywhere_is_the_rank(tmp_path: Path) -> None:
    assert alphas(on(tmp_path, BASE, pair(Q, rank=3))) == [(3.0, "rank")]


def test_the_option_beats_the_metadata_and_not_the_tensors(tmp_path: Path) -> None:
    lora = [*pair(Q, alpha=8), *pair(K)]
    found = on(tmp_path, BASE, lora, {"alpha": "16"}, alphas=(AlphaSpec(2.0),))
    assert sorted(alphas(found)) == [(2.0, "option"), (8.0, "tensor")]
    assert found.faults == ()


@pytest.mark.parametrize("text", ["abc", "nan", "inf"])
def test_bad_metadata_counts_where_it_would_be_used(tmp_path: Path, text: str) -> None:
    fault = only(on(tmp_path, BASE, [*pair(Q), *pair(K)], {"alpha": text}).faults)
    assert (fault.kind, fault.path, fault.key) == ("alpha", "x.safetensors", "__metadata__")
    stored = on(tmp_path, BASE, pair(Q, alpha=8), {"alpha": text})
    assert stored.faults == ()
    optional = on(tmp_path, BASE, pair(Q), {"alpha": text}, alphas=(AlphaSpec(2.0),))
    assert optional.faults == ()


@pytest.mark.parametrize("source", [None, "x.safetensors"])
def test_an_option_that_applies_to_nothing(tmp_path: Path, source: str | None) -> None:
    found = on(tmp_path, BASE, pair(Q, alpha=8), alphas=(AlphaSpec(2.0, source),))
    assert said(found) == [("unused_alpha", None)]
    assert "--alpha 2" in found.faults[0].message
    assert (source or "alpha 2 applies") in found.faults[0].message


def test_an_option_for_a_file_that_was_not_given(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, pair(Q), alphas=(AlphaSpec(2.0, "other.safetensors"),))
    assert said(found) == [("no_such_lora", None)]
    assert found.faults[0].message == "--alpha other.safetensors=: no such LoRA was given"


def test_an_option_on_differences_alone_applies_to_nothing(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, [tensor(f"{Q}.diff", 4, 4)], alphas=(AlphaSpec(2.0),))
    assert said(found) == [("unused_alpha", None)]


def test_an_option_means_one_file_by_its_path_or_its_name(tmp_path: Path) -> None:
    base, _ = one_component(tmp_path / "base.safetensors", BASE)
    first, second = (open_lora(tmp_path / f"{n}.safetensors", pair(Q)) for n in "ab")
    options = (AlphaSpec(2.0, str(tmp_path / "a.safetensors")), AlphaSpec(4.0, "b.safetensors"))
    found = checked(base, first, second, alphas=options)
    assert [hit.alpha.value for m in found.matchings for hit in m.hits if hit.alpha] == [2.0, 4.0]
    assert found.faults == ()


@pytest.mark.parametrize("order", [1, -1])
def test_an_option_for_one_file_beats_the_one_for_all(tmp_path: Path, order: int) -> None:
    base, _ = one_component(tmp_path / "base.safetensors", BASE)
    first, second = (open_lora(tmp_path / f"{n}.safetensors", pair(Q)) for n in "ab")
    options = (AlphaSpec(2.0), AlphaSpec(4.0, "b.safetensors"))[::order]
    found = checked(base, first, second, alphas=options)
    assert [hit.alpha.value for m in found.matchings for hit in m.hits if hit.alpha] == [2.0, 4.0]
    assert found.faults == ()


def test_a_second_option_for_the_same_files_is_refused(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, pair(Q), alphas=(AlphaSpec(2.0), AlphaSpec(4.0)))
    assert only(found.faults).message == "--alpha is given twice for all LoRAs"


def test_each_expert_s_alpha_in_the_header(tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", BASE)
    specs = [*pair(f"transformer.{Q}", style=PEFT), *pair(f"transformer_2.{Q}", style=PEFT)]
    header = {"transformer.lora_alpha": 8, "transformer_2.lora_alpha": 16}
    metadata = {"lora_adapter_metadata": json.dumps(header)}
    found = checked(base, open_lora(tmp_path / "x.safetensors", specs, metadata=metadata))
    assert [hit.alpha.value for m in found.matchings for hit in m.hits if hit.alpha] == [8.0, 16.0]


def test_metadata_that_disagrees_with_the_tensors_is_mentioned(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, [*pair(Q, alpha=4), *pair(K, alpha=2)], {"ss_network_alpha": "16.0"})
    assert codes(found) == ["metadata_disagrees"]
    (notice,) = found.notices
    assert "x.safetensors: its metadata says alpha 16, its tensors say 2, 4" in notice.message
    assert notice.facts == {"lora": "x.safetensors", "metadata": 16.0}


@pytest.mark.parametrize("metadata", [{"alpha": "8"}, {"alpha": "None"}, {"alpha": "abc"}, {}])
def test_metadata_that_agrees_or_says_nothing_is_not(tmp_path: Path, metadata: dict[str, str]) -> None:
    assert codes(on(tmp_path, BASE, pair(Q, alpha=8), metadata)) == []


# Misses


def test_every_miss_is_named_with_samples(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, [*pair(Q), *pair("ff.0"), tensor("ff.2.diff", 4, 4)])
    assert sorted(said(found)) == [("unmatched", "ff.0"), ("unmatched", "ff.2")]
    error = str(Refused(found.faults))
    assert "x.safetensors: 2 faults:" in error
    assert "ff.0 has no home in transformer" in error
    hint = found.faults[0].hint
    assert hint is not None and "--allow-unmatched" in hint and K in hint


def test_a_likely_reason_is_given(tmp_path: Path) -> None:
    base = [*BASE, tensor("patch_embedding.weight", 4, 16, 1, 2, 2)]
    found = on(tmp_path, base, [*pair(Q), *pair("blocks.0.cross_attn.k_img")])
    assert "image branch of Wan2.1" in only(found.faults).message


@pytest.mark.parametrize("glob", ["ff.*", "diffusion_model.ff.*", "*"])
def test_an_allowed_miss_is_a_skip(tmp_path: Path, glob: str) -> None:
    found = on(tmp_path, BASE, [*pair(Q), *pair("diffusion_model.ff.0")], allow_unmatched=(glob,))
    assert found.faults == ()
    assert [(s.module.name, s.reason) for s in found.matchings[0].skipped] == [
        ("diffusion_model.ff.0", ALLOWED)
    ]
    assert codes(found) == ["skipped"]
    assert found.notices[0].facts == {"lora": "x.safetensors", "reason": ALLOWED, "modules": 1}


def test_a_glob_allows_only_what_it_means(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, [*pair(Q), *pair("ff.0"), *pair("gg.0")], allow_unmatched=("ff.*", "hh.*"))
    assert said(found) == [("unmatched", "gg.0")]


def test_zero_leftovers_are_a_skip(tmp_path: Path) -> None:
    zero_pair = [
        tensor("t5.lora_down.weight", 2, 4, value=0),
        tensor("t5.lora_up.weight", 4, 2, value=0),
    ]
    found = on(tmp_path, BASE, [*pair(Q), *zero_pair, tensor("t6.diff", 4, value=0)])
    assert found.faults == ()
    assert {s.module.name: s.reason for s in found.matchings[0].skipped} == {
        "t5": ZERO_VALUED,
        "t6": ZERO_VALUED,
    }
    assert found.notices[0].facts["modules"] == 2


def test_a_leftover_with_one_value_is_a_miss(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, [*pair(Q), *pair("t5"), tensor("t5.diff_b", 4, value=0)])
    assert said(found) == [("unmatched", "t5")]


@pytest.mark.parametrize(
    ("down", "up", "diff_b", "zero"),
    [
        (0, 0, None, True),
        (0, 1, None, False),
        (1, 0, None, False),
        (0, -0.0, None, True),
        (0, 0, 0, True),
        (0, 0, 1, False),
        (None, None, 0, True),
        (None, None, 1, False),
    ],
)
def test_is_zero(
    tmp_path: Path, down: float | None, up: float | None, diff_b: float | None, zero: bool
) -> None:
    values = {"lora_down.weight": down, "lora_up.weight": up, "diff_b": diff_b}
    specs = [tensor(f"q.{part}", 2, 2, value=v) for part, v in values.items() if v is not None]
    adapter = open_lora(tmp_path / "x.safetensors", [*specs, tensor("q.alpha")])
    assert is_zero(adapter, adapter.modules[0]) is zero


@pytest.mark.parametrize("allowed", [(), ("*",)])
@pytest.mark.parametrize("strict", [False, True])
def test_nothing_that_matches_is_always_refused(
    tmp_path: Path, allowed: tuple[str, ...], strict: bool
) -> None:
    lora = [*pair("lora_unet_down_blocks_1_to_q"), *pair("lora_unet_mid_block_to_k")]
    fault = only(on(tmp_path, BASE, lora, allow_unmatched=allowed, strict=strict).faults)
    assert fault.kind == "no_match"
    assert "0 of 2 modules match transformer" in fault.message
    assert fault.hint is not None
    assert "lora_unet_down_blocks_1_to_q" in fault.hint and f"{K}.weight" in fault.hint
    assert fault.message.endswith("allowed to stay unmatched" if allowed else "another architecture")


def test_zeros_that_match_nothing_are_refused_too(tmp_path: Path) -> None:
    lora = [tensor("t5.lora_down.weight", 2, 4), tensor("t5.lora_up.weight", 4, 2, value=0)]
    assert only(on(tmp_path, BASE, lora).faults).kind == "no_match"


def test_an_alpha_for_a_name_that_two_loras_have(tmp_path: Path) -> None:
    checkpoint, _ = one_component(tmp_path / "base.safetensors", BASE)
    paths = [tmp_path / folder / "x.safetensors" for folder in ("a", "b")]
    loras = [open_lora(path, pair(Q), spec=LoraSpec(str(path))) for path in paths]
    fault = only(checked(checkpoint, *loras, alphas=(AlphaSpec(2.0, "x.safetensors"),)).faults)
    assert (fault.kind, fault.hint) == ("ambiguous", f"Say which: {paths[0]} or {paths[1]}.")
    assert "2 LoRAs are called so" in fault.message
    assert checked(checkpoint, *loras, alphas=(AlphaSpec(2.0, str(paths[1])),)).faults == ()


def test_alphas_alone_match_nothing(tmp_path: Path) -> None:
    assert only(on(tmp_path, BASE, [tensor(f"{Q}.alpha")]).faults).kind == "no_match"


def test_strict_allows_no_skip(tmp_path: Path) -> None:
    base = [*BASE, tensor("patch_embedding.weight", 4, 36, 1, 2, 2)]
    lora = [*pair(Q), *pair("blocks.0.cross_attn.k_img"), *pair("ff"), tensor("t5.diff", 4, value=0)]
    loose = on(tmp_path, base, lora, allow_unmatched=("ff",))
    assert loose.faults == ()
    assert codes(loose) == ["skipped"] * 3
    strict = on(tmp_path, base, lora, allow_unmatched=("ff",), strict=True)
    assert sorted(said(strict)) == [
        ("strict", "blocks.0.cross_attn.k_img"), ("strict", "ff"), ("strict", "t5"),
    ]  # fmt: skip
    assert on(tmp_path, BASE, pair(Q), strict=True).faults == ()


# Dtypes


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_factors_of_any_float(tmp_path: Path, dtype: str) -> None:
    assert on(tmp_path, BASE, pair(Q, dtype=dtype)).faults == ()


def test_factors_that_are_no_floats(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, [*pair(Q, dtype="I64"), tensor(f"{K}.diff", 4, 4, dtype="I64")])
    assert sorted(said(found)) == [
        ("dtype", f"{K}.diff"), ("dtype", f"{Q}.lora_down.weight"), ("dtype", f"{Q}.lora_up.weight"),
    ]  # fmt: skip
    assert "I64" in found.faults[0].message


@pytest.mark.parametrize(
    ("dtype", "what"), [("F8_E4M3", "fp8"), ("F8_E5M2", "fp8"), ("F64", "float64"), ("I64", "quantised")]
)
def test_targets_that_cannot_be_added_to(tmp_path: Path, dtype: str, what: str) -> None:
    base = [tensor(f"{Q}.weight", 4, 4, dtype=dtype), tensor(f"{K}.weight", 4, 4)]
    fault = only(on(tmp_path, base, [*pair(Q), *pair(K)]).faults)
    assert (fault.kind, fault.key, fault.path) == ("quantised", f"{Q}.weight", "base.safetensors")
    assert f"{dtype}: fusing into a {what} base" in fault.message


def test_an_untouched_tensor_may_have_any_dtype(tmp_path: Path) -> None:
    base = [*BASE, tensor("position_ids", 4, dtype="I64"), tensor("x.weight", 4, 4, dtype="F8_E4M3")]
    assert on(tmp_path, base, pair(Q)).faults == ()


@pytest.mark.parametrize(
    "sibling",
    [
        f"{Q}.weight.absmax",
        f"{Q}.weight.quant_map",
        f"{Q}.weight.quant_state.bitsandbytes__nf4",
        f"{Q}.scale_weight",
        f"{Q}.weight_scale",
        f"{Q}.qzeros",
    ],
)
def test_a_packed_target_is_told_by_its_siblings(tmp_path: Path, sibling: str) -> None:
    found = on(tmp_path, [*BASE, tensor(sibling, 4)], [*pair(Q), *pair(K)])
    assert said(found) == [("quantised", f"{Q}.weight")]


def test_a_packed_target_of_another_shape_is_called_packed(tmp_path: Path) -> None:
    base = [
        tensor(f"{Q}.weight", 8, 1, dtype="I64"),
        tensor(f"{Q}.weight.absmax", 4),
        tensor(f"{K}.weight", 4, 4),
    ]
    assert said(on(tmp_path, base, pair(Q))) == [("quantised", f"{Q}.weight")]


# Fused bases


def fused_base(folder: Path, *, marker: bool) -> Checkpoint:
    path = folder / "base" / "transformer" / "model.safetensors"
    write_safetensors(path, BASE, metadata={FINGERPRINT_KEY: f"sha256:{'1' * 64}"})
    if marker:
        listed = {"path": "transformer/model.safetensors", "bytes": path.stat().st_size, "fused": 1}
        component = {"dtype": "float32", "index": None, "tensors": 2, "fused": 1, "files": [listed]}
        document = {
            "schema": "fuselora.fused/1.0",
            "lora_is_fused": True,
            "fingerprint": f"sha256:{'1' * 64}",
            "components": {"transformer": component},
            "side_files": [],
            "loras": [{"name": "y", "content_sha256": "0" * 64, "component": "transformer", "strength": 1.0}],
        }
        (folder / "base" / "fused.json").write_bytes(encode(document))
    return open_base(folder / "base")


@pytest.mark.parametrize("marker", [True, False])
def test_a_fused_base_is_refused(tmp_path: Path, marker: bool) -> None:
    lora = open_lora(tmp_path / "x.safetensors", pair(Q))
    fault = only(checked(fused_base(tmp_path, marker=marker), lora).faults)
    assert (fault.kind, fault.path) == ("already_fused", "base")
    assert fault.hint is not None and ("--stack" in fault.hint) is marker


def test_stack_adds_to_a_fused_base(tmp_path: Path) -> None:
    lora = open_lora(tmp_path / "x.safetensors", pair(Q))
    found = checked(fused_base(tmp_path, marker=True), lora, stack=True)
    assert (found.faults, codes(found)) == ((), [])


def test_stack_needs_to_know_what_is_there(tmp_path: Path) -> None:
    lora = open_lora(tmp_path / "x.safetensors", pair(Q))
    fault = only(checked(fused_base(tmp_path, marker=False), lora, stack=True).faults)
    assert "fused.json is missing" in fault.message


def test_stack_on_a_plain_base_is_mentioned(tmp_path: Path) -> None:
    found = on(tmp_path, BASE, pair(Q), stack=True)
    assert (found.faults, codes(found)) == ((), ["not_stacked"])


# Notices about the base


def test_strays_and_a_stale_quantisation_note_are_mentioned(tmp_path: Path) -> None:
    folder = tmp_path / "base" / "transformer"
    write_safetensors(folder / "model.safetensors", BASE)
    (folder / "old.bin").write_bytes(b"x")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"bits": 4}}))
    found = checked(open_base(tmp_path / "base"), open_lora(tmp_path / "x.safetensors", pair(Q)))
    assert found.faults == ()
    assert {notice.code: notice.facts for notice in found.notices} == {
        "stray_weights": {"component": "transformer", "files": ["old.bin"]},
        "quantization_config": {"component": "transformer"},
    }


def test_orphan_alphas_are_mentioned(tmp_path: Path) -> None:
    assert codes(on(tmp_path, BASE, [*pair(Q), tensor(f"{K}.alpha")])) == ["orphan_alpha"]


# Sizes


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((3, 4), (4, 3)), "None of its shapes fits the base: the LoRA was made for another size"),
        (((4, 4), (4, 3)), "1 of 2 modules fit the base: the LoRA is for a variant"),
    ],
)
def test_the_hint_about_shapes_says_what_was_seen(
    tmp_path: Path, shapes: tuple[tuple[int, int], tuple[int, int]], says: str
) -> None:
    """No published model has these, so none is named."""
    lora = [spec for module, shape in zip((Q, K), shapes, strict=True) for spec in pair(module, *shape)]
    error = Refused(on(tmp_path, BASE, lora).faults)
    assert error.hint is not None and error.hint.startswith(says)
    assert error.hint.count(".") == 1


def test_a_sentence_of_a_hint_is_said_once() -> None:
    hints = ("It is for X. Do this.", "It is for X. Do that.", None, "Do this.")
    faults = [Fault("k", f"fault {n}", hint=hint) for n, hint in enumerate(hints)]
    assert Refused(faults).hint == "It is for X. Do this. Do that."


# All at once


def test_every_fault_of_every_lora_is_found(tmp_path: Path) -> None:
    base, _ = one_component(tmp_path / "base.safetensors", BASE)
    wrong = open_lora(tmp_path / "a.safetensors", [*pair(Q, 3, 3), *pair("x"), *pair("y")])
    other = open_lora(tmp_path / "b.safetensors", pair("nothing"))
    found = checked(base, wrong, other, alphas=(AlphaSpec(2.0, "c.safetensors"),))
    assert sorted(said(found), key=str) == sorted(
        [("shape", Q), ("unmatched", "x"), ("unmatched", "y"), ("no_match", "nothing.lora_down.weight"),
         ("no_such_lora", None)], key=str,
    )  # fmt: skip
    error = Refused(found.faults)
    assert "a.safetensors: 2 faults:\n  - x has no home" in error.message
    assert error.hint is not None
    # what may stay out is not the question while the rest does not fit
    assert "--allow-unmatched" not in error.hint
    assert error.hint.count("The base has keys like") == 1


def test_a_fault_on_both_experts_is_said_once(tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", BASE)
    adapter = open_lora(
        tmp_path / "x.safetensors", pair(Q, 3, 3), spec=LoraSpec("x.safetensors", component="all")
    )
    found = checked(base, adapter)
    assert len(found.faults) == 2
    assert len(Refused(found.faults).faults) == 1


def test_a_long_list_is_cut_with_its_length(tmp_path: Path) -> None:
    lora = [*pair(Q), *(spec for n in range(40) for spec in pair(f"x.{n}"))]
    message = Refused(on(tmp_path, BASE, lora).faults).message
    assert "40 faults:" in message
    assert "... and 28 more of this kind" in message
    assert message.count("has no home") == 12


def test_matchings_keep_their_order(tmp_path: Path) -> None:
    base, _ = one_component(tmp_path / "base.safetensors", BASE)
    adapters = [open_lora(tmp_path / f"{n}.safetensors", pair(Q)) for n in "cab"]
    found = checked(base, *adapters)
    assert [m.assignment.adapter.name for m in found.matchings] == [
        "c.safetensors",
        "a.safetensors",
        "b.safetensors",
    ]
    assert matched(adapters[0], base).hits[0].alpha is None


# What a LoRA is named for


@pytest.mark.parametrize(
    ("models", "source", "said"),
    [
        (("Wan2.1-T2V-14B",), "wan_i2v_480p.safetensors", "I2V"),
        (("Wan2.1-I2V-14B",), "Wan21_T2V_14B_rank64.safetensors", "T2V"),
        (("Wan2.2-T2V-A14B",), "Lightning/Wan2.2-I2V-A14B-4steps-V1/high_noise_model.safetensors", "I2V"),
        (("Wan2.2-T2V-A14B",), "hf://lightx2v/Wan2.2-I2V-Lightning/high.safetensors", "I2V"),
        (("Wan2.2-I2V-A14B",), "i2v/t2v.safetensors", "T2V"),
        (("Wan2.2-I2V-A14B",), "t2v/i2v.safetensors", None),
        (("Wan2.2-I2V-A14B",), "lightx2v/x.safetensors", None),
        (("Wan2.1-T2V-14B",), "t2v_and_i2v.safetensors", None),
        (("Wan2.1-T2V-14B",), "wan_ti2v_5b.safetensors", None),
        (("Wan2.1-T2V-14B", "Wan2.1-I2V-14B"), "i2v.safetensors", None),
        (("Wan2.1-VACE-14B",), "t2v.safetensors", None),
        ((), "i2v.safetensors", None),
    ],
)
def test_a_lora_named_for_another_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: tuple[str, ...], source: str, said: str | None
) -> None:
    monkeypatch.setattr(Family, "models_of", lambda *_: models)
    base = two_experts(tmp_path / "base", BASE)
    assert base.family is not None
    path = tmp_path / Path(source).name
    found = checked(base, open_lora(path, pair(Q), spec=LoraSpec(source, component="all")))
    assert found.faults == ()
    expected = (
        f"{path.name}: is named for {said}, and the base is {models[0]}; the shapes fit" if said else None
    )
    assert [notice.message for notice in found.notices] == ([expected] if expected else [])
    assert codes(found) == (["task_name"] if said else [])
