"""Skeletons: what is one, and what is taken from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuselora.errors import CheckpointError, FormatError, MarkerError
from fuselora.marker import FILE_NAME, JOURNAL_NAME
from fuselora.synth import config, tiny, write_file, write_native, write_pipeline, write_skeleton
from tests.skeletons import edit, opened, touch

T2V = tiny("wan2.2-t2v-a14b", blocks=1)
CONFIG, INDEX = "config.json", "model_index.json"


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """The one that fits."""
    return write_skeleton(tmp_path / "skeleton", T2V, experts=True)


# Opened


def test_what_a_skeleton_says(skeleton: Path) -> None:
    found = opened(skeleton)
    assert (found.root, found.source, found.revision) == (skeleton, "skeleton", None)
    assert found.pipeline_class == "WanPipeline"
    assert found.parts == ("scheduler", "text_encoder", "tokenizer", "vae")
    assert found.configs == {"transformer": config(T2V), "transformer_2": config(T2V)}
    assert found.classes["transformer_2"] == "WanTransformer3DModel"


def test_a_snapshot_in_the_hubs_cache_is_named_by_repository_and_commit(tmp_path: Path) -> None:
    snapshot = write_skeleton(tmp_path / "models--Wan-AI--x" / "snapshots" / "abc", T2V)
    found = opened(snapshot)
    assert (found.source, found.revision) == ("Wan-AI/x", "abc")


def test_what_comes_along(skeleton: Path) -> None:
    before = {file.path for file in opened(skeleton).files()}
    assert before == {
        INDEX, "transformer/config.json", "transformer_2/config.json", "scheduler/scheduler_config.json",
        "text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer/tokenizer_config.json",
        "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
    }  # fmt: skip
    taken = (
        "README.md",
        "vae/sub/notes.txt",
        "text_encoder/model.safetensors.index.json",
        "tokenizer/vocab.bin",
    )
    left = (
        "transformer/diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "transformer/diffusion_pytorch_model.safetensors.index.fp16.json",
        "transformer/diffusion_pytorch_model.bin",
        "transformer/backup/config.json",
        "transformer/notes.txt",
        "transformer_2/q4.gguf",
        "style.safetensors",
        "whole.ckpt",
        "models_t5.pth",
        "model.safetensors.index.json",
        "loras/style.safetensors",
        "high_noise_model/config.json",
        "text_encoder/pytorch_lora_weights.safetensors",
        "vae/adapter_model.safetensors",
        FILE_NAME,
        JOURNAL_NAME,
        ".git/config",
    )
    found = opened(skeleton)
    touch(*(skeleton / name for name in (*taken, *left)))
    assert {file.path for file in found.files()} == before | set(taken)


def test_nothing_of_a_transformer_but_its_config_is_taken(tmp_path: Path) -> None:
    whole = write_pipeline(tmp_path / "whole", T2V, experts=True, shard_bytes=60_000)
    taken = [file.path for file in opened(whole).files() if "transformer" in file.path]
    assert taken == ["transformer/config.json", "transformer_2/config.json"]


# What is no skeleton


def test_a_folder_without_model_index(tmp_path: Path) -> None:
    native = write_native(tmp_path / "native", T2V)
    with pytest.raises(CheckpointError, match=rf"^{native}: is no diffusers pipeline: it has no {INDEX}$"):
        opened(native)


def test_a_component_instead_of_its_pipeline(skeleton: Path) -> None:
    with pytest.raises(CheckpointError, match="is a component, not a pipeline") as caught:
        opened(skeleton / "transformer")
    assert caught.value.hint == f"Name {skeleton}."


def test_a_file(tmp_path: Path) -> None:
    file = write_file(tmp_path / "wan.safetensors", T2V)
    with pytest.raises(CheckpointError, match=rf"^{file}: is not a folder"):
        opened(file)


@pytest.mark.parametrize("path", [INDEX, "transformer_2/config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_broken_json(skeleton: Path, path: str, content: bytes) -> None:
    (skeleton / path).write_bytes(content)
    with pytest.raises(FormatError, match=rf"^{skeleton / path}: "):
        opened(skeleton)


def test_a_transformer_without_its_config(skeleton: Path) -> None:
    (skeleton / "transformer_2" / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=rf"^{skeleton}/transformer_2/{CONFIG}: is not there"):
        opened(skeleton)


def test_a_folder_that_the_index_does_not_name(skeleton: Path) -> None:
    edit(skeleton / INDEX, lambda document: document.update(transformer_2=[None, None]))
    with pytest.raises(
        CheckpointError, match=rf"^{skeleton / INDEX}: does not name transformer_2, and there"
    ):
        opened(skeleton)


@pytest.mark.parametrize("name", ["../vae", "", "a/b", ".."])
def test_a_component_that_can_be_no_folder(skeleton: Path, name: str) -> None:
    edit(skeleton / INDEX, lambda document: document.update({name: ["diffusers", "AutoencoderKLWan"]}))
    with pytest.raises(CheckpointError, match="which can be no folder's name"):
        opened(skeleton)


def test_the_unfinished_output_of_a_merge(skeleton: Path) -> None:
    touch(skeleton / JOURNAL_NAME)
    with pytest.raises(MarkerError, match="unfinished"):
        opened(skeleton)
