"""A LoRA in several files is the LoRA of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuselora.describe import describe
from fuselora.description import LoraDescription
from fuselora.digest import content_sha256
from fuselora.errors import CheckpointError, FormatError, InputError
from fuselora.shards import is_index, open_files, shard_names
from fuselora.verify import verify
from tests.cases.builders import K, Q, assert_filled, command, fuse, refuse, save, std_base, std_pair
from tests.inputs import pair, shard_name, sharded, tensor

TO_Q, TO_K = Q.removesuffix(".weight"), K.removesuffix(".weight")


def edited(index: Path, **changes: str | None) -> Path:
    """The index with another file for a tensor, or without the tensor."""
    document = json.loads(index.read_text("utf-8"))
    for key, file in ((key.replace("__", "."), file) for key, file in changes.items()):
        document["weight_map"] |= {key: file}
        if file is None:
            del document["weight_map"][key]
    index.write_text(json.dumps(document), encoding="utf-8")
    return index


# Reading an index


def test_an_index_by_its_name() -> None:
    assert is_index(Path("a/adapter_model.safetensors.index.json"))
    assert not is_index(Path("a/adapter_model.safetensors"))
    assert not is_index(Path("a/adapter_config.json"))


def test_the_files_of_an_index(tmp_path: Path) -> None:
    index = sharded(tmp_path, [tensor("x", 2)], [tensor("y", 3), tensor("z", 1)])
    names = (shard_name(1, 2), shard_name(2, 2))
    assert shard_names(index) == names
    assert [header.path.name for header in open_files(index)] == [*names]
    assert [header.path for header in open_files(tmp_path / names[0])] == [tmp_path / names[0]]


@pytest.mark.parametrize(
    "outside", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", ".", "", None, 3, ["x"]]
)
def test_an_index_names_files_of_its_own_folder(outside: object, tmp_path: Path) -> None:
    index = tmp_path / "in" / "adapter_model.safetensors.index.json"
    index.parent.mkdir()
    save(tmp_path / "x.safetensors", std_pair(2))
    index.write_text(json.dumps({"weight_map": {"x": outside}}), encoding="utf-8")
    for read in (open_files, shard_names, content_sha256):
        with pytest.raises(CheckpointError, match="no file name in this folder"):
            read(index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    index = tmp_path / "adapter_model.safetensors.index.json"
    index.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="adapter_model"):
        open_files(index)


def test_a_tensor_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    index = sharded(tmp_path, [tensor("x", 2)], [tensor("y", 3)])
    edited(index, x=shard_name(2, 2))
    with pytest.raises(CheckpointError, match="holds the tensor 'x', but it does not"):
        open_files(index)


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    index = sharded(tmp_path, [tensor("x", 2)], [tensor("y", 3), tensor("z", 2)])
    edited(index, z=None)
    with pytest.raises(CheckpointError, match=r"holds the tensor 'z', which .* does not place there"):
        open_files(index)


def test_a_name_in_two_files(tmp_path: Path) -> None:
    index = sharded(tmp_path, [tensor("x", 2), tensor("w", 2)], [tensor("y", 3), tensor("x", 2)])
    with pytest.raises(CheckpointError, match=r"holds the tensor 'x', which .* does not place there"):
        open_files(index)


def test_a_missing_file(tmp_path: Path) -> None:
    index = sharded(tmp_path, [tensor("x", 2)], [tensor("y", 3)])
    (tmp_path / shard_name(2, 2)).unlink()
    with pytest.raises(CheckpointError, match=f"names {shard_name(2, 2)}, which is not in the folder"):
        open_files(index)


def test_a_broken_file(tmp_path: Path) -> None:
    index = sharded(tmp_path, [tensor("x", 2)], [tensor("y", 3)])
    (tmp_path / shard_name(2, 2)).write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(FormatError, match="pickle"):
        open_files(index)


# A LoRA in several files, from end to end


def adapter(folder: Path, stem: str = "adapter_model") -> Path:
    """The standard pair on two modules, its tensors mixed up over two files."""
    q, k = pair(TO_Q, rank=2, alpha=4), pair(TO_K, rank=2)
    return sharded(folder, [q[0], k[1]], [k[0], *q[1:]], stem=stem)


@pytest.mark.parametrize("given", ["folder", "index"])
@pytest.mark.parametrize("stem", ["adapter_model", "pytorch_lora_weights"])
def test_it_is_merged_as_one(given: str, stem: str, tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora", stem)
    lora = index if given == "index" else index.parent
    base = std_base(tmp_path / "base")
    fused = fuse(base, lora)
    assert_filled(fused.tensors()[Q], 3.0)
    assert_filled(fused.tensors()[K], 3.0)
    assert fused.lora["name"] == index.name
    assert "sha256" not in fused.lora
    assert verify(fused.out, base=base, loras=[lora]).findings == ()


def test_it_has_the_content_of_the_same_tensors_in_one_file(tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora")
    q, k = pair(TO_Q, rank=2, alpha=4), pair(TO_K, rank=2)
    one = sharded(tmp_path, [*k, *q])
    assert content_sha256(index) == content_sha256(tmp_path / shard_name(1, 1)) == content_sha256(one)
    base = std_base(tmp_path / "base")
    sharded_out = fuse(base, index.parent, out=tmp_path / "a")
    whole_out = fuse(base, tmp_path / shard_name(1, 1), out=tmp_path / "b")
    assert sharded_out.lora["content_sha256"] == whole_out.lora["content_sha256"] == content_sha256(index)
    assert sharded_out.document["fingerprint"] == whole_out.document["fingerprint"]
    assert verify(sharded_out.out, base=base, loras=[tmp_path / shard_name(1, 1)]).findings == ()
    says = ("is the same LoRA for transformer, given twice", "with the sum of the strengths, 2.")
    refuse(base, index.parent, tmp_path / shard_name(1, 1), says=says, out=tmp_path / "c")


@pytest.mark.parametrize("given", ["folder", "index"])
def test_its_configuration_counts(given: str, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    one, two = (pair(f"base_model.model.{m}", rank=2, style=("lora_A", "lora_B")) for m in (TO_Q, TO_K))
    index = sharded(lora, one, two)
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    fused = fuse(std_base(tmp_path / "base"), lora if given == "folder" else index)
    assert_filled(fused.tensors()[Q], 5.0)
    assert fused.lora["alpha"] == {"source": "adapter_config", "values": [8.0]}


def test_check_knows_it(tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora")
    fused = fuse(std_base(tmp_path / "base"), index)
    for lora in (index, index.parent):
        assert "already" in command("check", fused.out, "--lora", lora).said


@pytest.mark.parametrize("given", ["folder", "index"])
def test_inspect_describes_it(given: str, tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora")
    found = describe(index if given == "index" else index.parent)
    assert isinstance(found, LoraDescription)
    assert (found.file, found.n_tensors, found.faults) == (index.name, 5, ())


def test_inspect_says_what_a_base_s_index_is(tmp_path: Path) -> None:
    index = sharded(tmp_path, [tensor("x.weight", 2)], [tensor("y.weight", 3)])
    with pytest.raises(InputError, match="is the index of a checkpoint") as caught:
        describe(index)
    assert caught.value.hint == f"Name the folder that it lies in: {tmp_path}"


@pytest.mark.parametrize("given", ["folder", "index"])
def test_a_missing_part_refuses_it(given: str, tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora")
    (index.parent / shard_name(2, 2)).unlink()
    says = (index.name, shard_name(2, 2), "not in the folder")
    refuse(std_base(tmp_path / "base"), index if given == "index" else index.parent, says=says)


def test_one_of_its_files_alone_is_refused(tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora")
    says = (shard_name(1, 2), "is one of 2 files of a LoRA", "index")
    refuse(std_base(tmp_path / "base"), index.parent / shard_name(1, 2), says=says)


def test_a_file_and_an_index_are_not_chosen_between(tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora")
    save(index.parent / "adapter_model.safetensors", std_pair(2))
    says = ("adapter_model.safetensors and adapter_model.safetensors.index.json",)
    refuse(std_base(tmp_path / "base"), index.parent, says=says)


def test_out_may_not_be_among_its_files(tmp_path: Path) -> None:
    index = adapter(tmp_path / "lora")
    refuse(std_base(tmp_path / "base"), index, says=("input",), out=index.parent)


def test_none_of_its_files_comes_along_from_the_base_s_folder(tmp_path: Path) -> None:
    base = std_base(tmp_path / "base")
    index = adapter(base / "lora")
    config = index.parent / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}), encoding="utf-8")
    (index.parent / "notes.txt").touch()
    fused = fuse(base, index.parent)
    assert [path.name for path in (fused.out / "lora").iterdir()] == ["notes.txt"]
    assert verify(fused.out, base=base, loras=[index.parent]).ok
