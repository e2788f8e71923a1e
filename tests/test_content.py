"""The pass over a LoRA's data: digests, values that are not finite, zeros, and the same content twice."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fuselora.content import (
    LoraContent,
    content_faults,
    read_content,
    zero_notices,
)
from fuselora.digest import READ_BYTES, content_sha256
from fuselora.errors import ChangedError, Fault, ReadError
from fuselora.header import check_unchanged
from fuselora.lora.adapter import open_adapter
from fuselora.marker import decode, encode
from fuselora.match import Matching, match
from fuselora.resolve import LoraLocation
from fuselora.specs import parse_lora
from fuselora.synth import Spec, write_safetensors
from fuselora.targets import assign
from tests.inputs import one_component, open_lora, pair, tensor, two_experts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fuselora.checkpoint import Checkpoint
    from fuselora.lora.adapter import Adapter

Q, K = "blocks.0.attn1.to_q", "blocks.0.attn1.to_k"
BASE = [tensor(f"{Q}.weight", 4, 4), tensor(f"{K}.weight", 4, 4)]


def content(adapter: Adapter, *, digest: bool = True) -> LoraContent:
    return read_content(adapter, digest=digest, advance=lambda done: None)


def opened(folder: Path, *specs: Spec, name: str = "x.safetensors") -> Adapter:
    return open_lora(folder / name, specs)


def reopened(adapter: Adapter) -> Adapter:
    return open_adapter(adapter.location)


# Digests


def test_both_digests_in_one_pass(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair(Q, alpha=8))
    found = content(adapter)
    assert found.sha256 == hashlib.sha256(adapter.location.path.read_bytes()).hexdigest()
    assert found.content_sha256 == content_sha256(adapter.location.path)
    assert (found.nonfinite, found.zero) == ((), frozenset())


def test_without_digests_the_content_s_is_still_taken(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair(Q))
    found = content(adapter, digest=False)
    assert found.sha256 is None
    assert found == replace(content(adapter), sha256=None)


def test_a_file_saved_again_has_the_same_content(tmp_path: Path) -> None:
    first = opened(tmp_path, *pair(Q), *pair(K), name="a.safetensors")
    second = open_lora(tmp_path / "b.safetensors", [*pair(K), *pair(Q)], metadata={"format": "pt"})
    assert content(first).content_sha256 == content(second).content_sha256
    assert content(first).sha256 != content(second).sha256


@pytest.mark.parametrize(
    "other",
    [
        [*pair(Q), tensor(f"{Q}.alpha")],
        pair(Q, value=2),
        pair(Q, rank=4),
        pair(Q, dtype="BF16"),
        pair(K),
        pair(Q, style=("lora_A", "lora_B")),
    ],
)
def test_another_content(tmp_path: Path, other: Sequence[Spec]) -> None:
    here, there = opened(tmp_path, *pair(Q), name="a"), opened(tmp_path, *other, name="b")
    assert content(here).content_sha256 != content(there).content_sha256


def test_progress_is_told_every_byte_of_the_data(tmp_path: Path) -> None:
    adapter = opened(tmp_path, tensor("big.diff", READ_BYTES // 4 + 1), *pair(Q))
    seen: list[int] = []
    read_content(adapter, digest=True, advance=seen.append)
    (header,) = adapter.files
    assert sum(seen) == header.n_bytes - header.data_start
    assert max(seen) <= READ_BYTES
    assert len(seen) == 2 + 2


# Values


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tensors_that_are_not_finite_are_named(tmp_path: Path, dtype: str, value: float) -> None:
    down, up = pair(Q, dtype=dtype)
    adapter = opened(tmp_path, down, replace(up, mean=value), tensor(f"{K}.diff", 4, 4))
    assert content(adapter).nonfinite == (up.name,)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64"])
def test_tensors_that_are_zero_are_named(tmp_path: Path, dtype: str) -> None:
    down, up = pair(Q, dtype=dtype)
    adapter = opened(tmp_path, down, replace(up, mean=0.0))
    assert content(adapter).zero == {up.name}


def test_one_value_anywhere_is_seen(tmp_path: Path) -> None:
    """At the start of the data, at its end, and across a boundary of blocks."""
    n = READ_BYTES // 4 + 2
    for at, value in ((0, 1.0), (n - 1, 1.0), (READ_BYTES // 4, math.nan)):
        adapter = opened(tmp_path, tensor("x.diff", n, value=0.0), tensor("y.diff", n, value=0.0))
        (header,), (first, _) = adapter.files, adapter.tensors
        with adapter.location.path.open("r+b") as stream:
            stream.seek(header.data_start + first.start + 4 * at)
            stream.write(struct.pack("<f", value))
        found = content(reopened(adapter))
        assert found.zero == {"y.diff"}
        assert found.nonfinite == (("x.diff",) if math.isnan(value) else ())


# A file that changes


def test_a_header_that_changed(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair(Q))
    write_safetensors(adapter.location.path, pair(Q, rank=3))
    with pytest.raises(ChangedError, match=r"x\.safetensors: was changed while it was read"):
        content(adapter)


def test_a_file_cut_short(tmp_path: Path) -> None:
    adapter = opened(tmp_path, tensor("a.diff", 1 << 18), tensor("b.diff", 1 << 18))
    last = adapter.tensors[-1].name

    def cut(done: int) -> None:
        os.truncate(adapter.location.path, adapter.n_bytes - 1)

    with pytest.raises(ChangedError, match=rf"x\.safetensors: was cut short while {last}") as caught:
        read_content(adapter, digest=True, advance=cut)
    assert caught.value.facts == {"path": str(adapter.location.path), "tensor": last}


def test_a_file_that_changed_after_it_was_read(tmp_path: Path) -> None:
    adapter = opened(tmp_path, *pair(Q))
    path = adapter.location.path
    (header,) = adapter.files
    content(adapter)
    check_unchanged(header)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(ChangedError, match=r"x\.safetensors: was changed"):
        check_unchanged(header)
    path.unlink()
    with pytest.raises(ReadError, match=r"x\.safetensors: cannot be read"):
        check_unchanged(header)


def test_links_and_permissions_that_come_and_go_are_no_edit(tmp_path: Path) -> None:
    """Another run may hard-link a file of the base; an edit that puts the date back is one still."""
    adapter = opened(tmp_path, *pair(Q))
    (header,) = adapter.files
    before = header.path.stat()
    os.link(header.path, tmp_path / "other")
    check_unchanged(header)
    (tmp_path / "other").unlink()
    header.path.chmod(0o600)
    check_unchanged(header)
    header.path.chmod(before.st_mode & 0o777)
    with header.path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")
    os.utime(header.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ChangedError, match=r"x\.safetensors: was changed"):
        check_unchanged(header)


def test_an_alpha_edited_between_header_and_data(tmp_path: Path) -> None:
    """The header stays what it was: the new digest would be recorded for what the old alpha scaled."""
    adapter = opened(tmp_path, *pair(Q, alpha=8))
    (header,) = adapter.files
    alpha = header.by_name()[f"{Q}.alpha"]
    before = header.path.stat()
    with header.path.open("r+b") as stream:
        stream.seek(header.data_start + alpha.start)
        stream.write(struct.pack("<f", 4.0))
    os.utime(header.path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(ChangedError, match=r"x\.safetensors: was changed"):
        content(adapter)


# Faults


def faults(base: Checkpoint, folder: Path, files: Mapping[str, Sequence[Spec]], *texts: str) -> list[Fault]:
    adapters = []
    for text in texts:
        for spec in parse_lora(text, exists=lambda _: False):
            path = write_safetensors(folder / spec.source, files[spec.source])
            adapters.append(open_adapter(LoraLocation(spec, path, path.name, None)))
    matchings = [match(a, base.family, base.layout) for a in assign(adapters, base).assignments]
    return list(content_faults(base, matchings, [content(adapter) for adapter in adapters]))


FILES = {
    "a.safetensors": pair(Q),
    "same.safetensors": pair(Q),
    "b.safetensors": pair(Q, value=2),
    "nan.safetensors": [*pair(Q), tensor(f"{K}.diff", 4, 4, value=math.nan)],
}


def single(folder: Path) -> Checkpoint:
    return one_component(folder / "base.safetensors", BASE)[0]


def test_broken_factors_refuse_the_lora(tmp_path: Path) -> None:
    (fault,) = faults(single(tmp_path), tmp_path, FILES, "nan.safetensors", "a.safetensors")
    assert (fault.kind, fault.path, fault.key) == ("non_finite", "nan.safetensors", f"{K}.diff")
    assert "NaN or infinity" in fault.message


def test_broken_factors_on_both_experts_are_said_once(tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", BASE)
    found = faults(base, tmp_path, FILES, "all=nan.safetensors")
    assert [fault.key for fault in found] == [f"{K}.diff"]


def test_the_same_content_twice_on_one_component(tmp_path: Path) -> None:
    (fault,) = faults(single(tmp_path), tmp_path, FILES, "a.safetensors", "same.safetensors:0.5")
    assert (fault.kind, fault.path) == ("same_lora", "same.safetensors")
    assert fault.message == (
        "is the same LoRA for transformer, given twice: a.safetensors:1 and same.safetensors:0.5"
    )
    assert fault.hint == "For transformer give it once, with the sum of the strengths, 1.5."


def test_different_contents_on_one_component(tmp_path: Path) -> None:
    assert faults(single(tmp_path), tmp_path, FILES, "a.safetensors", "b.safetensors") == []


def test_a_list_of_one_lora_and_its_copy(tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", BASE)
    (fault,) = faults(base, tmp_path, FILES, "a.safetensors,same.safetensors")
    assert fault.kind == "same_lora"
    assert fault.message == "holds the same LoRA as a.safetensors:1, given twice in one list"
    assert fault.hint is not None and "--lora all=FILE" in fault.hint


@pytest.mark.parametrize("texts", [("all=a.safetensors",), ("high=a.safetensors", "low=same.safetensors")])
def test_one_lora_on_both_experts_when_it_is_said_so(tmp_path: Path, texts: tuple[str, ...]) -> None:
    assert faults(two_experts(tmp_path / "base", BASE), tmp_path, FILES, *texts) == []


def test_all_and_the_same_for_one_expert_is_twice(tmp_path: Path) -> None:
    base = two_experts(tmp_path / "base", BASE)
    (fault,) = faults(base, tmp_path, FILES, "all=a.safetensors", "low=same.safetensors:-0.25")
    assert fault.kind == "same_lora"
    assert fault.message.endswith(
        " for transformer_2, given twice: all=a.safetensors:1 and transformer_2=same.safetensors:-0.25"
    )
    assert fault.hint is not None and fault.hint.endswith(", 0.75.")


def stacked(folder: Path, **fields: object) -> Checkpoint:
    """A base whose first expert holds the LoRA of ``pair(Q)``."""
    base = two_experts(folder / "base", BASE)
    held = content(opened(folder, *pair(Q))).content_sha256
    lora = {"name": "first.safetensors", "content_sha256": held, "component": "transformer", "strength": 1.0}
    file = {"path": "transformer/diffusion_pytorch_model.safetensors", "bytes": 1, "fused": 1}
    component = {"dtype": "float32", "index": None, "tensors": 2, "fused": 1, "files": [file]}
    document = {
        "schema": "fuselora.fused/1.0",
        "lora_is_fused": True,
        "fingerprint": f"sha256:{'1' * 64}",
        "components": {"transformer": component},
        "side_files": [],
        "loras": [{**lora, **fields}],
    }
    return replace(base, marker=decode(encode(document)))


def test_what_the_base_already_holds(tmp_path: Path) -> None:
    """``--stack`` passes the header checks; the content decides."""
    base = stacked(tmp_path)
    (fault,) = faults(base, tmp_path, FILES, "high=same.safetensors", "low=a.safetensors")
    assert (fault.kind, fault.path) == ("already_fused", "same.safetensors")
    where = "is already fused into transformer of this base, as first.safetensors at strength 1"
    assert fault.message == where
    assert fault.hint is not None and "start from the base that is not fused" in fault.hint
    assert faults(base, tmp_path, FILES, "high=b.safetensors") == []


@pytest.mark.parametrize("fields", [{"strength": 0.0}, {"applied": {"pairs": 0, "diff": 0}}])
def test_what_the_base_lists_and_does_not_hold(tmp_path: Path, fields: dict[str, object]) -> None:
    assert faults(stacked(tmp_path, **fields), tmp_path, FILES, "high=a.safetensors") == []


# Zero deltas


def zero_matching(folder: Path) -> tuple[Matching, LoraContent]:
    down, up = pair(Q)
    adapter = opened(folder, down, replace(up, mean=0.0), *pair(K), tensor(f"{K}.diff", 4, 4, value=0.0))
    base = single(folder)
    (assignment,) = assign([adapter], base).assignments
    return match(assignment, base.family, base.layout), content(adapter)


def test_a_delta_is_zero_if_any_of_its_tensors_is(tmp_path: Path) -> None:
    matching, found = zero_matching(tmp_path)
    assert {(hit.base_key, hit.kind.name): found.zeroes(hit) for hit in matching.hits} == {
        (f"{Q}.weight", "pair"): True,
        (f"{K}.weight", "pair"): False,
        (f"{K}.weight", "diff"): True,
    }


def test_zero_deltas_are_counted(tmp_path: Path) -> None:
    matching, found = zero_matching(tmp_path)
    (notice,) = zero_notices([matching], [found])
    assert notice.code == "zero_delta"
    assert notice.message == "x.safetensors: the delta is zero in 2 of 3 modules"
    assert notice.facts == {"lora": "x.safetensors", "zero": 2, "of": 3}
    assert zero_notices([matching], [replace(found, zero=frozenset())]) == ()
