"""check: a folder compared with its marker, and the LoRAs that are in it already."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fuselora.check import folder as folder_module
from fuselora.check.folder import SMALL_BYTES, check
from fuselora.digest import sha256_file
from fuselora.errors import FormatError, InputError
from fuselora.marker import COMPONENT_KEY, FILE_NAME, FINGERPRINT_KEY, JOURNAL_NAME
from tests.marked import (
    CONFIG,
    COPIED_SHARD,
    EARLIER,
    FINGERPRINT,
    FUSED_SHARD,
    INDEX,
    METADATA,
    artifact_of,
    changed,
    codes,
    describe,
    entry,
    load,
    store,
    without_digests,
    write_fused,
    write_lora,
    write_safetensors,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_fused(tmp_path / "out")


@pytest.fixture
def lora(out: Path) -> Path:
    return out.parent / "lora.safetensors"


# --- checking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [False, True])
def test_a_whole_folder_is_ok(out: Path, digest: bool) -> None:
    report = check(out, digest=digest)
    assert report.findings == ()
    assert (report.fused, report.whole, report.ok, report.already_fused) == (True, True, True, ())
    assert report.artifact == load(out)["artifact"]


def test_a_plain_folder_is_not_fused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "transformer" / "model.safetensors", {"x": b"abcd"}, {})
    report = check(tmp_path)
    assert (report.fused, report.whole, report.ok, report.marker) == (False, False, False, None)
    assert codes(report) == {("no-marker", FILE_NAME)}


def test_a_removed_marker_is_seen_in_the_shards(out: Path) -> None:
    (out / FILE_NAME).unlink()
    report = check(out)
    assert (report.fused, report.whole, report.ok) == (True, False, False)
    assert codes(report) == {("removed", FILE_NAME)}
    assert "was removed" in report.findings[0].message
    assert FUSED_SHARD in report.findings[0].message


def test_a_component_of_a_fused_folder_is_told_where_the_marker_is(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check(out / "transformer")
    assert (report.fused, report.whole, report.ok) == (True, False, False)
    assert codes(report) == {("elsewhere", FILE_NAME)}
    assert report.findings[0].message.startswith(f"is not here but in {out}; {Path(FUSED_SHARD).name}")
    assert report.findings[0].hint == "Check the folder that holds fused.json."
    monkeypatch.chdir(out / "transformer")
    assert codes(check(".")) == {("elsewhere", FILE_NAME)}


@pytest.mark.parametrize("kind", ["copy", "link", "link to a component"])
def test_a_fused_component_in_a_pipeline_is_named(out: Path, tmp_path: Path, kind: str) -> None:
    pipeline, part = tmp_path / "pipeline", tmp_path / "pipeline" / "transformer"
    pipeline.mkdir()
    if kind == "link to a component":
        part.symlink_to(out / "transformer")
    else:
        shutil.copy(out / FILE_NAME, out / "transformer")
        if kind == "link":
            part.symlink_to(out / "transformer")
        else:
            shutil.copytree(out / "transformer", part)
    home = out if kind == "link to a component" else part
    report = check(pipeline)
    assert codes(report) == {("elsewhere", FILE_NAME)}
    assert report.findings[0].message.startswith(f"is not here but in {home}; transformer/")


def test_a_broken_shard_does_not_hide_a_removed_marker(out: Path) -> None:
    (out / FILE_NAME).unlink()
    (out / "a.safetensors").write_bytes(b"junk")
    assert check(out).fused


def test_a_broken_marker_is_a_finding(out: Path) -> None:
    (out / FILE_NAME).write_text("{")
    report = check(out)
    assert codes(report) == {("marker", FILE_NAME)}
    assert str(out) not in report.findings[0].message  # its path is said once
    assert (report.fused, report.ok) == (True, False)


@pytest.mark.parametrize(
    ("code", "text"),
    [("marker", "{"), ("version", '{"schema": "fuselora.fused/2.0", "lora_is_fused": true}')],
)
def test_a_broken_marker_is_a_marker_without_a_fused_shard_too(tmp_path: Path, code: str, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    report = check(tmp_path)
    assert codes(report) == {(code, FILE_NAME)}
    assert (report.fused, report.whole, report.ok) == (True, False, False)
    assert next(report.lines(tmp_path)) == f"{tmp_path}: fused, but not whole"


def test_an_unfinished_folder_is_a_finding(out: Path) -> None:
    (out / FILE_NAME).rename(out / JOURNAL_NAME)
    report = check(out)
    assert codes(report) == {("unfinished", JOURNAL_NAME)}
    assert not report.ok


def test_an_unfinished_folder_without_a_fused_shard_is_not_fused(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).touch()
    report = check(tmp_path)
    assert codes(report) == {("unfinished", JOURNAL_NAME)}
    assert (report.fused, report.ok) == (False, False)


@pytest.mark.parametrize("digest", [False, True])
def test_an_edited_digest_in_the_marker_is_found(out: Path, digest: bool) -> None:
    document = load(out)
    (out / FUSED_SHARD).write_bytes((out / FUSED_SHARD).read_bytes().replace(b"aaaa", b"zzzz"))
    document["components"]["transformer"]["files"][0]["sha256"] = sha256_file(out / FUSED_SHARD)
    store(out, document)
    assert codes(check(out, digest=digest)) == {("artifact", FILE_NAME)}


@pytest.mark.parametrize("dropped", ["artifact", "one digest"])
def test_an_identity_is_there_with_every_digest_or_not_at_all(out: Path, dropped: str) -> None:
    document = load(out)
    if dropped == "artifact":
        del document["artifact"]
    else:
        config = document["side_files"].pop(0)
        document["artifact"] = artifact_of(document)
        document["side_files"].append({"path": config["path"], "bytes": config["bytes"]})
    store(out, document)
    assert codes(check(out)) == {("artifact", FILE_NAME)}


def test_counts_that_disagree_are_found(out: Path) -> None:
    store(out, changed(load(out), "components.transformer.fused", 2))
    report = check(out)
    assert codes(report) == {("marker", FILE_NAME)}
    assert "counts 2 fused tensors" in report.findings[0].message


def test_a_removed_entry_makes_its_file_a_stray(out: Path) -> None:
    document = load(out)
    del document["components"]["transformer"]["files"][1]
    document["artifact"] = artifact_of(document)
    store(out, document)
    assert codes(check(out)) == {("stray", COPIED_SHARD)}


@pytest.mark.parametrize("path", [FUSED_SHARD, COPIED_SHARD, INDEX, CONFIG])
def test_a_missing_file_is_found(out: Path, path: str) -> None:
    (out / path).unlink()
    assert codes(check(out)) == {("missing", path)}


def test_a_missing_component_folder_is_found(out: Path) -> None:
    shutil.rmtree(out / "transformer")
    assert codes(check(out)) == {("missing", path) for path in (FUSED_SHARD, COPIED_SHARD, INDEX, CONFIG)}


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_is_found(out: Path, change: int) -> None:
    with (out / FUSED_SHARD).open("r+b") as stream:
        stream.truncate((out / FUSED_SHARD).stat().st_size + change)
    assert codes(check(out)) == {("size", FUSED_SHARD)}


def test_the_shard_of_the_base_in_place_of_ours_is_found(out: Path) -> None:
    filler = {"fuselora.other": "x" * len(FINGERPRINT + FINGERPRINT_KEY)}
    write_safetensors(out / FUSED_SHARD, {"to_q.weight": b"aaaabbbb"}, filler)
    found = codes(check(out))
    assert ("header", FUSED_SHARD) in found
    assert ("fingerprint", FUSED_SHARD) in found
    assert ("size", FUSED_SHARD) not in found


def test_the_shard_of_another_fusion_is_found(out: Path) -> None:
    document = changed(load(out), "components.transformer.files.0.header_sha256", ...)
    store(out, document)
    write_safetensors(out / FUSED_SHARD, {"to_q.weight": b"aaaabbbb"}, {FINGERPRINT_KEY: EARLIER})
    assert codes(check(out)) == {("fingerprint", FUSED_SHARD)}


def test_two_shards_swapped_are_found(out: Path) -> None:
    """Of one size and one fusion: the headers tell them apart."""
    write_safetensors(out / COPIED_SHARD, {"to_k.weight": b"ccccdddd"}, METADATA)
    store(out, describe(out))
    assert check(out).ok
    (out / FUSED_SHARD).rename(out / "x")
    (out / COPIED_SHARD).rename(out / FUSED_SHARD)
    (out / "x").rename(out / COPIED_SHARD)
    assert codes(check(out)) == {("header", FUSED_SHARD), ("header", COPIED_SHARD)}


def test_a_shard_of_another_component_is_found(out: Path) -> None:
    """Shards of two experts are alike in size, names and shapes; their metadata tells."""
    other = METADATA | {COMPONENT_KEY: "transforme2"}
    write_safetensors(out / FUSED_SHARD, {"to_q.weight": b"aaaabbbb"}, other)
    report = check(out)
    assert codes(report) == {("component", FUSED_SHARD)}
    assert "is a shard of transforme2" in report.findings[0].message


def test_a_copied_shard_may_name_the_component_that_it_was_fused_as(out: Path) -> None:
    earlier = {FINGERPRINT_KEY: EARLIER, COMPONENT_KEY: "unet"}
    write_safetensors(out / COPIED_SHARD, {"to_k.weight": b"ccccdddd"}, earlier)
    store(out, describe(out) | {"stacked_on": EARLIER})
    assert check(out).ok


def test_a_shard_that_is_not_safetensors_is_found(out: Path) -> None:
    size = (out / FUSED_SHARD).stat().st_size
    (out / FUSED_SHARD).write_bytes(b"\xff" * size)
    report = check(out)
    assert codes(report) == {("header", FUSED_SHARD)}
    assert FUSED_SHARD not in report.findings[0].message  # it is said once, before the message


def test_a_shard_without_fused_tensors_may_not_carry_another_fingerprint(out: Path) -> None:
    write_safetensors(out / COPIED_SHARD, {"to_k.weight": b"ccccdddd"}, {FINGERPRINT_KEY: EARLIER})
    document = describe(out)
    store(out, document)
    assert codes(check(out)) == {("fingerprint", COPIED_SHARD)}
    store(out, document | {"stacked_on": EARLIER})
    assert check(out).ok


@pytest.mark.parametrize("digest", [False, True])
def test_changed_weights_are_found(out: Path, digest: bool) -> None:
    (out / FUSED_SHARD).write_bytes((out / FUSED_SHARD).read_bytes().replace(b"aaaa", b"zzzz"))
    report = check(out, digest=digest)
    assert codes(report) == {("content", FUSED_SHARD)}
    assert report.artifact not in (None, load(out)["artifact"])


def test_changed_weights_of_a_large_shard_are_found_by_digest_only(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "SMALL_BYTES", (out / FUSED_SHARD).stat().st_size)
    (out / FUSED_SHARD).write_bytes((out / FUSED_SHARD).read_bytes().replace(b"aaaa", b"zzzz"))
    assert check(out).ok
    assert codes(check(out, digest=True)) == {("content", FUSED_SHARD)}


@pytest.mark.parametrize("text", ['{"dim": 8}', '{"dim": 16}'])
def test_an_edited_config_is_found_without_digest(out: Path, text: str) -> None:
    (out / CONFIG).write_text(text)
    same_size = len(text) == len('{"dim": 4}')
    assert codes(check(out)) == {("content" if same_size else "size", CONFIG)}


def test_a_large_side_file_is_read_with_digest_only(out: Path) -> None:
    large = out / "vae" / "model.safetensors"
    large.parent.mkdir()
    with large.open("wb") as stream:
        stream.truncate(SMALL_BYTES)
    document = load(out)
    document["side_files"].append(entry(out, "vae/model.safetensors"))
    store(out, document | {"artifact": artifact_of(document)})
    with large.open("r+b") as stream:
        stream.write(b"x")
    assert check(out).ok
    assert codes(check(out, digest=True)) == {("content", "vae/model.safetensors")}


def test_without_digests_sizes_and_headers_are_all_there_is(out: Path) -> None:
    store(out, without_digests(load(out)))
    assert check(out).ok
    report = check(out, digest=True)
    assert codes(report) == {("no-digests", FILE_NAME)}
    assert report.artifact is None


def test_a_one_file_checkpoint_has_its_component_in_the_root(out: Path) -> None:
    document = load(out)
    (out / FUSED_SHARD).rename(out / "model.safetensors")
    shutil.rmtree(out / "transformer")
    part = document["components"]["transformer"]
    del part["index"]
    part["files"] = [part["files"][0] | {"path": "model.safetensors"}]
    document["side_files"] = []
    store(out, document | {"artifact": artifact_of(document)})
    assert check(out, digest=True).ok
    (out / "lora.safetensors").write_bytes(b"")
    assert codes(check(out)) == {("stray", "lora.safetensors")}


@pytest.mark.parametrize("path", [FUSED_SHARD, CONFIG, FILE_NAME])
def test_a_link_that_leaves_the_folder_is_found(out: Path, tmp_path: Path, path: str) -> None:
    target = tmp_path / "elsewhere"
    (out / path).rename(target)
    (out / path).symlink_to(target)
    assert codes(check(out)) == {("outside", path)}


def test_a_linked_component_folder_is_found(out: Path, tmp_path: Path) -> None:
    (out / "transformer").rename(tmp_path / "elsewhere")
    (out / "transformer").symlink_to(tmp_path / "elsewhere")
    assert ("outside", FUSED_SHARD) in codes(check(out))


def test_a_link_inside_the_folder_is_a_file_like_any_other(out: Path) -> None:
    (out / CONFIG).rename(out / "shared.json")
    (out / CONFIG).symlink_to("../shared.json")
    assert check(out).ok


def test_a_recorded_link_may_leave_the_folder(out: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (out / CONFIG).rename(target)
    (out / CONFIG).symlink_to(target)
    store(out, changed(load(out), "side_files.0.link", "hardlink"))
    assert codes(check(out)) == {("outside", CONFIG)}
    store(out, changed(load(out), "side_files.0.link", "symlink"))
    assert check(out).ok
    target.write_text('{"dim": 5}')
    assert codes(check(out)) == {("content", CONFIG)}
    target.unlink()
    assert codes(check(out)) == {("missing", CONFIG)}


def test_a_folder_in_the_hub_cache_may_link_to_its_blobs(out: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--me--fused"
    blobs = repository / "blobs"
    snapshot = repository / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for n, path in enumerate([FILE_NAME, FUSED_SHARD, COPIED_SHARD, INDEX, CONFIG]):
        shutil.copy(out / path, blobs / str(n))
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(os.path.relpath(blobs / str(n), (snapshot / path).parent))
    assert check(snapshot, digest=True).ok
    for other in (repository / "other", tmp_path / "blobs"):
        (snapshot / CONFIG).unlink()
        shutil.copy(blobs / "4", other)
        (snapshot / CONFIG).symlink_to(other)
        assert codes(check(snapshot)) == {("outside", CONFIG)}


def test_the_blobs_of_the_hub_cache_may_lie_on_another_disk(out: Path, tmp_path: Path) -> None:
    repository, blobs = tmp_path / "models--me--fused", tmp_path / "disk"
    snapshot = repository / "snapshots" / "0123"
    shutil.copytree(out, snapshot)
    blobs.mkdir()
    (repository / "blobs").symlink_to(blobs)
    (snapshot / CONFIG).rename(blobs / "1")
    (snapshot / CONFIG).symlink_to("../../../blobs/1")
    assert check(snapshot).ok


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "LICENSE.txt", ".gitattributes", "sample.PNG"])
def test_documents_in_the_root_may_change(out: Path, name: str) -> None:
    (out / name).write_text("the base's")
    document = load(out)
    document["side_files"].append(entry(out, name))
    store(out, document | {"artifact": artifact_of(document)})
    assert check(out, digest=True).artifact == artifact_of(document)
    for text in ("our own", "the b_se's"):
        (out / name).write_text(text)
        report = check(out, digest=True)
        assert report.ok and report.artifact != artifact_of(document)
    (out / name).unlink()
    assert check(out, digest=True).ok


@pytest.mark.parametrize("name", ["tokenizer/README.md", "README.safetensors", "model_index.json"])
def test_other_files_may_not(out: Path, name: str) -> None:
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("the base's")
    document = load(out)
    document["side_files"].append(entry(out, name))
    store(out, document | {"artifact": artifact_of(document)})
    (out / name).write_text("our own")
    assert codes(check(out)) == {("size", name)}


def test_what_is_not_a_file_is_found_and_not_opened(out: Path) -> None:
    (out / CONFIG).unlink()
    os.mkfifo(out / CONFIG)
    (out / FUSED_SHARD).unlink()
    (out / FUSED_SHARD).mkdir()
    assert codes(check(out)) == {("unreadable", CONFIG), ("unreadable", FUSED_SHARD)}


def test_a_name_too_long_for_the_file_system_is_found(out: Path) -> None:
    document = without_digests(load(out))
    document["side_files"].append({"path": "x" * 5000, "bytes": 1})
    store(out, document)
    report = check(out)
    assert codes(report) == {("unreadable", "x" * 5000)}
    assert str(out) not in report.findings[0].message


# --- LoRAs that are in it already ------------------------------------------------------------------


def test_the_lora_that_was_fused_is_recognised(out: Path, lora: Path) -> None:
    report = check(out, loras=[lora])
    assert (report.whole, report.ok) == (True, False)
    assert [record.name for record in report.already_fused] == ["lora.safetensors"]


@pytest.mark.parametrize("kind", ["renamed", "re-saved"])
def test_a_copy_of_it_is_recognised_under_any_name(out: Path, lora: Path, tmp_path: Path, kind: str) -> None:
    other = tmp_path / "another name.safetensors"
    if kind == "renamed":
        shutil.copy(lora, other)
    else:
        write_lora(other, reverse=True)
        assert sha256_file(other) != sha256_file(lora)
    assert not check(out, loras=[other]).ok


def test_another_lora_is_not(out: Path, lora: Path, tmp_path: Path) -> None:
    other = write_lora(tmp_path / "lora-2.safetensors", first=b"zzzz")
    report = check(out, loras=[other])
    assert report.ok
    both = check(out, loras=[other, lora])
    assert [bool(outcome.records) for outcome in both.loras] == [False, True]
    assert [outcome.path for outcome in both.loras] == [other, lora]


def test_a_lora_is_recognised_without_digests(out: Path, lora: Path) -> None:
    store(out, without_digests(load(out)))
    assert not check(out, loras=[lora]).ok


def test_what_cannot_be_told_is_not_said(out: Path, lora: Path) -> None:
    (out / FILE_NAME).unlink()
    report = check(out, loras=[lora])
    assert (report.already_fused, report.ok) == ((), False)
    assert f"{lora}: nobody can tell" in "\n".join(report.lines(out))


def test_a_lora_that_cannot_be_read_is_an_error(out: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"junk")
    with pytest.raises(FormatError, match=r"bad\.safetensors"):
        check(out, loras=[tmp_path / "bad.safetensors"])
    with pytest.raises(InputError, match=r"absent\.safetensors"):
        check(out, loras=[tmp_path / "absent.safetensors"])


@pytest.mark.parametrize("key", ["decoder.conv.weight", "decoder.act.alpha", "conv.bias", ""])
def test_a_file_without_a_lora_is_an_error(out: Path, tmp_path: Path, key: str) -> None:
    write_safetensors(tmp_path / "vae.safetensors", {key: b"abcd"} if key else {}, {})
    with pytest.raises(FormatError, match=r"vae\.safetensors: is no LoRA: (none of its 1 tensors|empty)"):
        check(out, loras=[tmp_path / "vae.safetensors"])


@pytest.mark.parametrize("key", ["to_q.lora_up.weight", "to_q.dora_scale", "to_q.diff_b", "to_q.hada_w1_a"])
def test_any_kind_of_lora_is_one(out: Path, tmp_path: Path, key: str) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"to_q.weight": b"abcd", key: b"abcd"}, {})
    assert check(out, loras=[tmp_path / "x.safetensors"]).ok


def test_what_the_policy_says_of_other_loras_is_said(out: Path, tmp_path: Path) -> None:
    store(out, changed(load(out), "policy", {"distill_lora": "warn"}))
    report = check(out, loras=[write_lora(tmp_path / "x.safetensors", first=b"zzzz")])
    assert "the policy for other LoRAs: distill_lora warn, dynamic_lora allow" in "\n".join(report.lines(out))
    assert report.document()["policy"] == {"distill_lora": "warn", "dynamic_lora": "allow"}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"distill_lora": "bogus"}, "has the policy distill_lora 'bogus'; it is one of refuse, warn, allow"),
        ({"dynamic_lora": ["x"]}, "has the policy dynamic_lora ['x']"),
        ({"distil_lora": "refuse"}, "has a policy for 'distil_lora', which does not exist"),
        ("refuse all", "has the policy distill_lora 'refuse all'"),
    ],
)
def test_a_misspelled_policy_is_found(out: Path, policy: object, said: str) -> None:
    store(out, changed(load(out), "policy", policy))
    report = check(out)
    assert codes(report) == {("policy", FILE_NAME)}
    assert report.findings[0].message.startswith(said)
    assert "distill_lora and dynamic_lora are each one of refuse" in report.findings[0].hint


def test_a_newer_marker_may_have_more_policies(out: Path) -> None:
    policy = {"distill_lora": "refuse", "new": "refuse"}
    store(out, load(out) | {"schema": "fuselora.fused/1.7", "policy": policy})
    assert check(out).ok


# --- a file in the place of a folder ---------------------------------------------------------------


def hint_about(path: Path) -> str:
    with pytest.raises(InputError, match="is not a folder but a file") as caught:
        check(path)
    return caught.value.hint or ""


def test_a_shard_moved_alone_still_says_what_it_is(out: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copy(out / FUSED_SHARD, tmp_path / "x.safetensors"))
    assert hint_about(moved) == (
        f"It is a shard of the fused checkpoint {FINGERPRINT}. Name the folder that holds fused.json."
    )


def test_a_shard_in_its_place_names_the_folder_to_check(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint_about(out / FUSED_SHARD).endswith(f"Name the folder that holds fused.json, {out}.")
    monkeypatch.chdir(out / "transformer")
    assert hint_about(Path(Path(FUSED_SHARD).name)).endswith(f"fused.json, {out}.")


def test_another_file_is_for_inspect(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"junk")
    assert "What a file is, fuselora inspect says." in hint_about(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["my-org/wan-fused", "hf://my-org/wan-fused"])
def test_a_hub_repository_is_to_be_fetched(name: str) -> None:
    with pytest.raises(InputError, match="is not a folder: nothing has that name") as caught:
        check(name)
    hub = "of a Hub repository: hf download my-org/wan-fused --local-dir wan-fused"
    assert caught.value.message.startswith(f"{name}: ")
    assert caught.value.hint == f"check takes a folder on this machine; {hub}"


@pytest.mark.parametrize("name", ["wan-fused", "../wan-fused", "a/b/c", "/absent"])
def test_what_is_no_repository_is_just_not_there(name: str) -> None:
    with pytest.raises(InputError) as caught:
        check(name)
    assert caught.value.hint == "Name the folder that fuselora merge wrote."
