"""What a server may load, decided from real markers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fuselora import synth
from fuselora.errors import AlreadyFused, MarkerError
from fuselora.marker import FILE_NAME, JOURNAL_NAME, Marker, read_marker
from fuselora.pipeline import merge
from fuselora.serving.guard import AskedLora, Found, StartUp, decide, decide_lost, look
from tests.fused_pair import FUSED, SIZE, Pair, edit_marker, rewritten, shard_of, write_high, write_pair

OPTIONS = "--lora-backend distill and --lora-path"
HELD = (
    "is fused: it holds high.safetensors on transformer, strength 1; "
    "low.safetensors on transformer_2, strength 0.5"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def out(pair: Pair, tmp_path: Path) -> Path:
    return pair.copy(tmp_path / "out")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA that the pair was not fused with."""
    return write_high(tmp_path_factory.mktemp("other") / "other.safetensors", seed=9)


def start(*files: Path, fuses: bool = True) -> StartUp:
    loras = tuple(AskedLora(str(file), (file,)) for file in files)
    return StartUp("wan", loras, fuses, OPTIONS if fuses else "--lora-path")


def marker(folder: Path) -> Marker:
    found = read_marker(folder)
    assert found is not None
    return found


def find_marker(path: Path) -> Marker | None:
    """The only marker that says what ``path`` is fused with."""
    markers = look(path).markers
    assert len(markers) < 2
    return markers[0] if markers else None


def refuse_lost_marker(name: str, path: Path) -> None:
    lost = look(path).lost
    if lost is not None:
        decide_lost(name, lost, adds=True)


def policy(folder: Path, values: object) -> Marker:
    """The marker with another policy."""
    edit_marker(folder, lambda document: document.update(policy=values))
    return marker(folder)


def test_a_server_without_a_lora_is_told_what_is_fused(pair: Pair) -> None:
    admission = decide(marker(pair.out), start())
    assert admission.line == f"wan {HELD}; no LoRA is added"
    assert not admission.warning


@pytest.mark.parametrize("fuses", [True, False])
def test_a_lora_that_is_in_it_is_refused(pair: Pair, fuses: bool) -> None:
    with pytest.raises(AlreadyFused) as refused:
        decide(marker(pair.out), start(pair.high, pair.low, fuses=fuses))
    options = OPTIONS if fuses else "--lora-path"
    assert refused.value.message.splitlines() == [
        f"wan: is fused already; {options} would add a LoRA that it holds a second time:",
        f"  - {pair.high} is high.safetensors on transformer, strength 1",
        f"  - {pair.low} is low.safetensors on transformer_2, strength 0.5",
        f"Serve it as it is: leave out {options}.",
    ]
    assert refused.value.hint is not None
    assert "fuselora merge --stack --base wan --lora FILE --out NEW" in refused.value.hint
    assert refused.value.facts == {"path": "wan", "loras": [str(pair.high), str(pair.low)]}


@pytest.mark.parametrize("values", ["allow", "warn"])
def test_no_policy_lets_a_listed_lora_in(pair: Pair, out: Path, values: str) -> None:
    allowing = policy(out, {"distill_lora": values, "dynamic_lora": values})
    for fuses in (True, False):
        with pytest.raises(AlreadyFused, match="second time"):
            decide(allowing, start(pair.low, fuses=fuses))


def test_renamed_and_rewritten_copies_are_recognised(pair: Pair, tmp_path: Path) -> None:
    renamed = Path(shutil.copy(pair.high, tmp_path / "mine.safetensors"))
    saved_again = rewritten(pair.low, tmp_path / "again.safetensors", {"by": "me"})
    with pytest.raises(AlreadyFused) as refused:
        decide(marker(pair.out), start(renamed, saved_again))
    assert "mine.safetensors is high.safetensors on transformer" in refused.value.message
    assert "again.safetensors is low.safetensors on transformer_2" in refused.value.message


def test_a_listed_lora_of_which_nothing_was_added_is_another_one(pair: Pair, tmp_path: Path) -> None:
    loras = [f"high={pair.high}", f"low={pair.low}:0"]
    held = marker(merge(pair.base, loras, tmp_path / "none", digest=False).out)
    line = decide(held, start(pair.low, fuses=False)).line
    assert "low.safetensors on transformer_2, strength 0, nothing of it added; its policy lets " in line
    with pytest.raises(AlreadyFused, match="distill_lora in the policy"):
        decide(held, start(pair.low))


def test_one_listed_lora_among_others_refuses_all(pair: Pair, out: Path, other: Path) -> None:
    allowing = policy(out, {"distill_lora": "allow", "dynamic_lora": "allow"})
    with pytest.raises(AlreadyFused) as refused:
        decide(allowing, start(other, pair.low))
    assert f"  - {other} is not in it" in refused.value.message.splitlines()


def test_one_listed_file_of_an_adapter_folder_is_enough(pair: Pair, other: Path) -> None:
    folder = AskedLora("adapters", (other, pair.low))
    with pytest.raises(AlreadyFused, match=r"adapters is low\.safetensors on transformer_2"):
        decide(marker(pair.out), StartUp("wan", (folder,), True, OPTIONS))


def test_a_lora_on_both_experts_is_named_for_both(pair: Pair, tmp_path: Path) -> None:
    out = merge(pair.base, [f"all={pair.low}"], tmp_path / "both").out
    with pytest.raises(AlreadyFused) as refused:
        decide(marker(out), start(pair.low))
    assert "on transformer, strength 1" in refused.value.message
    assert "on transformer_2, strength 1" in refused.value.message


def test_another_distilled_lora_is_refused_unless_the_policy_allows_it(out: Path, other: Path) -> None:
    with pytest.raises(AlreadyFused) as refused:
        decide(marker(out), start(other))
    assert "distill_lora in the policy of its marker is 'refuse'" in refused.value.message
    assert str(other) in refused.value.message
    admission = decide(policy(out, {"distill_lora": "allow"}), start(other))
    assert admission.line == f"wan {HELD}; its policy lets {other} be added"
    assert not admission.warning
    assert decide(policy(out, {"distill_lora": "warn"}), start(other)).warning


def test_another_dynamic_lora_passes_unless_the_policy_refuses_it(out: Path, other: Path) -> None:
    assert not decide(marker(out), start(other, fuses=False)).warning
    assert decide(policy(out, {"dynamic_lora": "warn"}), start(other, fuses=False)).warning
    with pytest.raises(AlreadyFused, match="dynamic_lora in the policy of its marker is 'refuse'"):
        decide(policy(out, {"dynamic_lora": "refuse"}), start(other, fuses=False))


@pytest.mark.parametrize("value", ["maybe", "ALLOW", "", None, True, 3, ["allow"], {}])
@pytest.mark.parametrize("fuses", [True, False])
def test_a_policy_that_is_not_known_refuses(out: Path, other: Path, value: object, fuses: bool) -> None:
    for values in ({"distill_lora": value, "dynamic_lora": value}, value):
        if values == {}:
            continue  # nothing said: the defaults
        strange = policy(out, values)
        with pytest.raises(AlreadyFused, match="which this fuselora does not know"):
            decide(strange, start(other, fuses=fuses))
        assert decide(strange, start()).line.endswith("no LoRA is added")


def test_a_marker_without_a_policy_means_the_defaults(out: Path, other: Path) -> None:
    edit_marker(out, lambda document: document.pop("policy"))
    assert decide(marker(out), start(other, fuses=False)).line.endswith("be added")
    with pytest.raises(AlreadyFused):
        decide(marker(out), start(other))


def test_what_cannot_be_compared_is_said(out: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "adapter_model.bin"
    torch.save({"a": torch.ones(1)}, pickled)
    unseen = (AskedLora("org/lora", ()), AskedLora("gone", (tmp_path / "gone",)), AskedLora("b", (pickled,)))
    for lora in unseen:
        admission = decide(marker(out), StartUp("wan", (lora,), False, "--lora-path"))
        assert f"{lora.name} was not compared: " in admission.line
        assert admission.warning
        with pytest.raises(AlreadyFused):
            decide(marker(out), StartUp("wan", (lora,), True, OPTIONS))
    allowing = policy(out, {"distill_lora": "allow"})
    assert decide(allowing, StartUp("wan", unseen, True, OPTIONS)).warning


@pytest.mark.parametrize("fuses", [True, False])
def test_a_file_that_cannot_be_read_hides_no_listed_one(
    pair: Pair, out: Path, tmp_path: Path, fuses: bool
) -> None:
    pointer = tmp_path / "a.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    folder = AskedLora("folder", (pointer, tmp_path / "gone.safetensors", pair.low))
    found = policy(out, {"distill_lora": "allow", "dynamic_lora": "allow"})
    with pytest.raises(AlreadyFused, match=r"folder is low\.safetensors on transformer_2, strength 0\.5"):
        decide(found, StartUp("wan", (folder,), fuses, OPTIONS))
    admission = decide(found, StartUp("wan", (AskedLora("folder", (pointer,)),), fuses, OPTIONS))
    assert admission.warning
    assert f"folder was not compared: {pointer}: " in admission.line


def test_names_forge_no_lines(pair: Pair, tmp_path: Path) -> None:
    strange = Path(shutil.copy(pair.low, tmp_path / "a\nINFO forged\x1b[2J.safetensors"))
    out = merge(pair.base, [f"transformer={strange}"], tmp_path / "out").out
    assert "a\\nINFO forged\\x1b[2J.safetensors on transformer" in decide(marker(out), start()).line
    with pytest.raises(AlreadyFused) as refused:
        decide(marker(out), start(strange))
    assert not any(line.startswith("INFO") for line in refused.value.message.splitlines())


FORGED = "a\nINFO forged\x1b[2J\u202e"
ESCAPED = "a\\nINFO forged\\x1b[2J\\u202e"


def test_names_of_what_cannot_be_compared_forge_no_lines(out: Path, tmp_path: Path) -> None:
    lora = AskedLora("lora", (tmp_path / FORGED,))
    line = decide(marker(out), StartUp("wan", (lora,))).line
    assert f"lora was not compared: {tmp_path / ESCAPED}: " in line
    for text in ("\n", "\x1b", "\u202e"):
        assert text not in line
    with pytest.raises(AlreadyFused) as refused:
        decide(marker(out), StartUp(FORGED, (AskedLora(FORGED, ()),), fuses=True))
    lines = refused.value.message.splitlines()
    assert (lines[0].startswith(f"{ESCAPED}: is fused already"), len(lines)) == (True, 3)
    assert refused.value.hint is not None and f"--base {ESCAPED} --lora" in refused.value.hint


def test_names_of_shards_without_a_marker_forge_no_lines(out: Path) -> None:
    (out / FILE_NAME).unlink()
    for shard in out.glob("transformer*/*.safetensors"):
        shard.rename(shard.with_name(f"{FORGED}{shard.name}"))
    with pytest.raises(MarkerError) as lost:
        refuse_lost_marker(FORGED, out)
    assert lost.value.message.startswith(f"{ESCAPED}: fused.json was removed: transformer/{ESCAPED}")
    assert len(lost.value.message.splitlines()) == 1


def test_the_marker_of_a_folder_of_a_part_of_it_and_of_a_file_in_it(pair: Pair, out: Path) -> None:
    shard = next((out / "transformer").glob("*.safetensors"))
    for path in (out, out / "transformer", out / "transformer" / ".." / "transformer_2"):
        found = find_marker(path)
        assert found is not None
        assert found.fingerprint == marker(pair.out).fingerprint
    for path in (out / "vae", out / "trans", out / "model_index.json"):
        assert find_marker(path) is None
    assert find_marker(shard) is None
    assert find_marker(pair.base) is None


def test_the_marker_beside_a_checkpoint_of_one_file(tmp_path: Path) -> None:
    base = synth.write_file(tmp_path / "wan.safetensors", SIZE)
    lora = synth.write_lora(tmp_path / "lora.safetensors", SIZE)
    out = merge(base, [str(lora)], tmp_path / "out").out
    found = find_marker(out / "wan.safetensors")
    assert found is not None
    with pytest.raises(AlreadyFused):
        decide(found, start(lora))
    beside = Path(shutil.copy(base, out / "another.safetensors"))
    assert find_marker(beside) is None


def test_a_relative_path_has_its_marker(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out)
    assert find_marker(Path()) is not None
    monkeypatch.chdir(out / "transformer")
    assert find_marker(Path()) is not None


def test_a_broken_marker_is_an_error_and_never_no_marker(out: Path) -> None:
    (out / FILE_NAME).write_bytes(b"{")
    for path in (out, out / "transformer"):
        with pytest.raises(MarkerError):
            find_marker(path)


def test_a_marker_of_an_unknown_major_version_is_an_error(out: Path) -> None:
    document = json.loads((out / FILE_NAME).read_text(encoding="utf-8"))
    document["schema"] = "fuselora.fused/2.0"
    (out / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(MarkerError):
        find_marker(out)


def test_an_unfinished_folder_is_an_error(out: Path) -> None:
    (out / FILE_NAME).rename(out / JOURNAL_NAME)
    shard = shard_of(out, "transformer", FUSED)
    for path in (out, out / "transformer", Path(shutil.copy(shard, out / "model.safetensors"))):
        with pytest.raises(MarkerError, match="unfinished"):
            find_marker(path)


def test_a_lost_marker_lets_no_lora_in(pair: Pair, out: Path) -> None:
    (out / FILE_NAME).unlink()
    assert find_marker(out) is None
    with pytest.raises(MarkerError, match="carries the fingerprint of a fusion"):
        refuse_lost_marker("wan", out)
    fused = [path for path in out.glob("transformer/*.safetensors") if _is_refused(path)]
    assert fused
    refuse_lost_marker("base", pair.base)
    refuse_lost_marker("base", next(pair.base.glob("transformer/*.safetensors")))


def _is_refused(path: Path) -> bool:
    try:
        refuse_lost_marker("shard", path)
    except MarkerError as error:
        return "carries the fingerprint of a fusion" in error.message
    return False


def test_a_file_of_another_format_has_lost_no_marker(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(600))
    refuse_lost_marker("model", tmp_path / "model.gguf")


@pytest.mark.parametrize("foreign", [b'{"other": "tool"}', b"{", None])
def test_a_foreign_file_beside_a_folder_is_not_its_marker(
    pair: Pair, tmp_path: Path, foreign: bytes | None
) -> None:
    base = Path(shutil.copytree(pair.base, tmp_path / "models" / "wan"))
    if foreign is None:
        (tmp_path / "models" / FILE_NAME).mkdir()
    else:
        (tmp_path / "models" / FILE_NAME).write_bytes(foreign)
    for path in (base, base / "transformer", next(base.glob("transformer/*.safetensors"))):
        assert look(path) == Found()
    (base / "transformer" / FILE_NAME).symlink_to(tmp_path / "models" / FILE_NAME)
    assert look(base) == Found()


def test_a_broken_marker_beside_a_fused_file_is_an_error(pair: Pair, tmp_path: Path) -> None:
    shutil.copy(shard_of(pair.out, "transformer", FUSED), tmp_path / "wan.safetensors")
    (tmp_path / FILE_NAME).write_bytes(b"{")
    with pytest.raises(MarkerError, match=r"fused\.json"):
        look(tmp_path / "wan.safetensors")


def test_links_are_followed_as_the_system_follows_them(pair: Pair, tmp_path: Path) -> None:
    link = tmp_path / "links" / "t"
    link.parent.mkdir()
    link.symlink_to(pair.out / "transformer")
    for path in (link, link / "..", link / ".." / "transformer_2"):
        found = find_marker(path)
        assert found is not None
        assert found.fingerprint == marker(pair.out).fingerprint


@pytest.fixture(scope="module")
def component(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base's transformer, fused with the high LoRA as a checkpoint of its own."""
    return merge(pair.base / "transformer", [str(pair.high)], tmp_path_factory.mktemp("part") / "out").out


@pytest.fixture(params=["copied", "linked"])
def assembled(pair: Pair, component: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The base with that component in the place of its own."""
    folder = Path(shutil.copytree(pair.base, tmp_path / "assembled"))
    shutil.rmtree(folder / "transformer")
    if request.param == "copied":
        shutil.copytree(component, folder / "transformer")
    else:
        (folder / "transformer").symlink_to(component)
    return folder


def test_the_markers_of_fused_components(pair: Pair, component: Path, assembled: Path, other: Path) -> None:
    found = find_marker(assembled)
    assert found is not None
    assert found.fingerprint == marker(component).fingerprint
    assert look(assembled).lost is None
    with pytest.raises(AlreadyFused, match="a second time"):
        decide(found, start(pair.high))
    assert decide(found, start(other, fuses=False)).line.endswith(f"its policy lets {other} be added")


def test_a_component_with_a_marker_and_one_that_lost_it(pair: Pair, component: Path, assembled: Path) -> None:
    shutil.rmtree(assembled / "transformer_2")
    shutil.copytree(pair.out / "transformer_2", assembled / "transformer_2")
    found = look(assembled)
    assert [one.fingerprint for one in found.markers] == [marker(component).fingerprint]
    assert found.lost is not None
    assert found.lost.startswith(f"{FILE_NAME} was removed: transformer_2/")


def test_a_component_linked_from_a_fused_folder_has_its_marker(pair: Pair, tmp_path: Path) -> None:
    base = Path(shutil.copytree(pair.base, tmp_path / "base"))
    shutil.rmtree(base / "transformer")
    (base / "transformer").symlink_to(pair.out / "transformer")
    found = look(base)
    assert [one.fingerprint for one in found.markers] == [marker(pair.out).fingerprint]
    assert found.lost is None


@pytest.mark.parametrize("name", [FILE_NAME, JOURNAL_NAME])
def test_a_component_with_a_broken_marker_or_unfinished_is_an_error(
    pair: Pair, tmp_path: Path, name: str
) -> None:
    base = Path(shutil.copytree(pair.base, tmp_path / "base"))
    if name == FILE_NAME:
        shutil.copy(shard_of(pair.out, "transformer", FUSED), base / "transformer")
    (base / "transformer" / name).write_bytes(b"{")
    with pytest.raises(MarkerError):
        look(base)


def test_a_lost_marker_without_a_lora_is_a_warning(pair: Pair, out: Path) -> None:
    (out / FILE_NAME).unlink()
    lost = look(out).lost
    assert lost is not None
    admission = decide_lost("wan", lost, adds=False)
    assert admission.warning
    assert admission.line.startswith("wan: fused.json was removed: transformer/")
    assert admission.line.endswith("No LoRA is asked for, so it is served.")
