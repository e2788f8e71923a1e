"""A native base written as a diffusers pipeline: the same bytes as its twin in diffusers' names gives."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fuselora
from fuselora.errors import ChangedError, OutputError, Refused, UsageError
from fuselora.header import read_header
from fuselora.marker import FILE_NAME, JOURNAL_NAME, check, read_marker
from fuselora.pipeline import FuseReport, merge, plan
from fuselora.specs import Request
from fuselora.steps import Copy
from fuselora.synth import (
    SIZES,
    Spec,
    WanSize,
    config,
    tiny,
    write_component,
    write_file,
    write_lora,
    write_native,
    write_pipeline,
    write_safetensors,
    write_skeleton,
)
from fuselora.verify import verify
from tests import listings
from tests.fused_pair import edit_json, edit_marker, flip_bit, found
from tests.small import tree
from tests.validated import assert_valid

ROOT = Path(__file__).resolve().parent.parent
SHARD_BYTES = 60_000
INDEX = "diffusion_pytorch_model.safetensors.index.json"
SHARD = re.compile(r"diffusion_pytorch_model-\d{5}-of-\d{5}\.safetensors")
PREFIX = "model.diffusion_model."
LISTED = sorted(name for name in SIZES if "vace" not in name)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """One set of weights in both layouts, a skeleton, and a LoRA for each component."""

    folder: Path
    size: WanSize
    native: Path
    twin: Path
    skeleton: Path
    loras: tuple[Path, ...]

    @property
    def components(self) -> tuple[str, ...]:
        return ("transformer", "transformer_2")[: len(self.loras)]

    @property
    def spec(self) -> str:
        return ",".join(map(str, self.loras))

    def merge(self, out: Path, loras: list[str] | None = None, **options: Any) -> FuseReport:
        skeleton = options.pop("skeleton", self.skeleton)
        base = options.pop("base", self.native)
        return merge(base, loras or [self.spec], out, layout="diffusers", skeleton=skeleton, **options)


def written(folder: Path, name: str, *, experts: bool, **options: Any) -> Inputs:
    size = tiny(name, options.pop("blocks", 1))
    options = {"experts": experts, "shard_bytes": SHARD_BYTES, **options}
    loras = [
        write_lora(folder / f"lora_{n}.safetensors", size, style="extractor", seed=7 + n)
        for n in range(1 + experts)
    ]
    return Inputs(
        folder,
        size,
        write_native(folder / "native", size, **options),
        write_pipeline(folder / "twin", size, **options),
        write_skeleton(folder / "skeleton", size, experts=experts),
        tuple(loras),
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Wan2.2-I2V: two experts, 36 channels in, no image branch."""
    folder = tmp_path_factory.mktemp("pair")
    return written(folder, "wan2.2-i2v-a14b", experts=True, dtype="BF16", mixed=True, blocks=2)


@pytest.fixture(scope="module")
def out(pair: Inputs) -> Path:
    return pair.merge(pair.folder / "out").out


@pytest.fixture(autouse=True, scope="module")
def _same_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield


def weights(folder: Path) -> Tensors:
    read: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        read |= load_file(path)
    return read


def assert_same(ours: Path, theirs: Path) -> None:
    """Names, dtypes and bytes of every tensor."""
    first, second = weights(ours), weights(theirs)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def assert_whole_component(folder: Path, n_shards: int) -> None:
    """Numbered shards and one index, which says where each tensor is, and no other weights."""
    shards = sorted(path.name for path in folder.iterdir() if path.name not in ("config.json", INDEX))
    assert shards == [
        f"diffusion_pytorch_model-{n:05d}-of-{n_shards:05d}.safetensors" for n in range(1, n_shards + 1)
    ]
    index = json.loads((folder / INDEX).read_text())
    headers = {name: read_header(folder / name) for name in shards}
    assert index["weight_map"] == {t.name: name for name, header in headers.items() for t in header.tensors}
    assert index["metadata"]["total_size"] == sum(t.n_bytes for h in headers.values() for t in h.tensors)


# The same as the twin


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "T2V experts, float32": ("wan2.2-t2v-a14b", {"experts": True}, {}),
    "T2V experts, cast": ("wan2.2-t2v-a14b", {"experts": True}, {"dtype": "bfloat16"}),
    "T2V experts, cast throughout": (
        "wan2.2-t2v-a14b", {"experts": True}, {"dtype": "bfloat16", "uniform": True},
    ),
    "I2V experts, mixed": ("wan2.2-i2v-a14b", {"experts": True, "dtype": "BF16", "mixed": True}, {}),
    "one shard each": ("wan2.2-i2v-a14b", {"experts": True, "shard_bytes": 1 << 30}, {}),
    "image branch": ("wan2.1-i2v-14b", {"experts": False, "dtype": "F16"}, {"dtype": "bfloat16"}),
    "TI2V": ("wan2.2-ti2v-5b", {"experts": False, "dtype": "BF16"}, {}),
    "VACE": ("wan2.1-vace-14b", {"experts": False, "dtype": "BF16", "blocks": 2}, {"kernel": "reference"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_the_twins(tmp_path: Path, case: str) -> None:
    name, made, asked = CASES[case]
    inputs = written(tmp_path, name, **made)
    ours = inputs.merge(tmp_path / "ours", **asked)
    theirs = merge(inputs.twin, [inputs.spec], tmp_path / "theirs", **asked)
    for number, component in enumerate(inputs.components):
        assert_same(ours.out / component, theirs.out / component)
        assert_whole_component(ours.out / component, len(ours.plan.components[number].files))
    plain = weights(inputs.twin / "transformer")
    assert not any(
        torch.equal(tensor, plain[key]) for key, tensor in weights(ours.out / "transformer").items()
    )


@pytest.mark.parametrize("prefix", ["", PREFIX, "diffusion_model."])
@pytest.mark.parametrize("name", ["wan2.1-i2v-14b", "wan2.2-t2v-a14b"])
def test_a_single_file(tmp_path: Path, name: str, prefix: str) -> None:
    size = tiny(name, blocks=1)
    base = write_file(tmp_path / "wan.safetensors", size, prefix=prefix, metadata={"a": "b"})
    twin = write_pipeline(tmp_path / "twin", size, dtype="BF16")
    skeleton = write_skeleton(tmp_path / "skeleton", size)
    lora = write_lora(tmp_path / "lora.safetensors", size, style="extractor")
    ours = merge(base, [lora], tmp_path / "ours", layout="diffusers", skeleton=skeleton).out
    assert_same(ours / "transformer", merge(twin, [lora], tmp_path / "theirs").out / "transformer")
    assert_whole_component(ours / "transformer", 1)
    (shard,) = (ours / "transformer").glob("*.safetensors")
    metadata = read_header(shard).metadata
    assert (metadata["a"], metadata["format"]) == ("b", "pt")
    assert verify(ours, base=base, loras=[lora], skeleton=skeleton).ok


def test_an_expert_without_a_lora_is_converted_too(pair: Inputs, tmp_path: Path) -> None:
    report = pair.merge(tmp_path / "out", [f"transformer={pair.loras[0]}"])
    assert_same(report.out / "transformer_2", pair.twin / "transformer_2")
    assert_whole_component(report.out / "transformer_2", len(report.plan.components[1].files))
    assert report.marker.components["transformer_2"].fused == 0
    for file in report.plan.components[1].files:
        assert len(file.steps) == 1
        assert isinstance(file.steps[0], Copy)


def test_both_experts_at_their_strengths(pair: Inputs, tmp_path: Path) -> None:
    style = write_lora(tmp_path / "style.safetensors", pair.size, style="kohya")
    specs = [f"high={pair.loras[0]}:0.5", f"low={pair.loras[1]}:2", f"all={style}:-0.25"]
    ours, theirs = pair.merge(tmp_path / "ours", specs), merge(pair.twin, specs, tmp_path / "theirs")
    for component in pair.components:
        assert_same(ours.out / component, theirs.out / component)


def test_a_pipeline_whose_transformers_have_native_names(pair: Inputs, out: Path, tmp_path: Path) -> None:
    """Such a folder can be its own skeleton."""
    base = write_skeleton(tmp_path / "base", pair.size, experts=True)
    for part, component in (("high_noise_model", "transformer"), ("low_noise_model", "transformer_2")):
        for path in (pair.native / part).glob("*.safetensors*"):
            shutil.copy(path, base / component)
    ours = pair.merge(tmp_path / "ours", base=base, skeleton=base)
    for component in pair.components:
        assert_same(ours.out / component, out / component)
    assert verify(ours.out, base=base, loras=pair.loras, skeleton=base).ok


# True size


@pytest.mark.parametrize("name", LISTED)
def test_published_lists_become_diffusers_lists(tmp_path: Path, name: str) -> None:
    size = SIZES[name]
    base = tmp_path / "base"
    write_component(base, listings.base(name, "native"), fill="hole")
    skeleton = write_skeleton(tmp_path / "skeleton", size)
    edit_json(skeleton / "transformer" / "config.json", lambda found: found.update(listings.config(name)))
    diff = Spec("diffusion_model.blocks.0.self_attn.q.diff_b", "BF16", (size.dim,))
    lora = write_safetensors(tmp_path / "lora.safetensors", [diff], fill="hole")
    planned = plan(base, [lora], layout="diffusers", skeleton=skeleton)
    (component,) = planned.components
    headers = (json.loads(file.header[8:]) for file in component.files)
    rows = {
        (key, entry["dtype"], tuple(entry["shape"]))
        for header in headers
        for key, entry in header.items()
        if key != "__metadata__"
    }
    assert rows == set(listings.rows(listings.base(name, "diffusers")))
    assert len(rows) == component.n_tensors == len(component.weight_map)
    assert all(SHARD.fullmatch(file.path.name) for file in component.files)


# The rest of the folder


def test_the_rest_is_the_skeletons(pair: Inputs, out: Path) -> None:
    ours = tree(out)
    rest = {
        path: content
        for path, content in ours.items()
        if not SHARD.search(path) and INDEX not in path and path != FILE_NAME
    }
    assert rest == tree(pair.skeleton)
    assert json.loads(rest["model_index.json"])["boundary_ratio"] == 0.9
    assert check(out, digest=True).ok


def test_nothing_of_a_skeletons_own_weights_is_taken(pair: Inputs, out: Path, tmp_path: Path) -> None:
    """Neither its weights and markers nor LoRAs that lie in it: those given, and others."""
    skeleton = write_pipeline(tmp_path / "skeleton", pair.size, experts=True, seed=50, shard_bytes=30_000)
    write_lora(skeleton / "style.safetensors", pair.size)
    fused = merge(skeleton, [pair.spec], tmp_path / "fused").out
    write_lora(fused / "loras" / "style.safetensors", pair.size)
    lora = Path(shutil.copy(pair.loras[0], fused / "vae" / "given.safetensors"))
    report = pair.merge(tmp_path / "out", [f"{lora},{pair.loras[1]}"], skeleton=fused)
    assert {path for path in tree(report.out) if "safetensors" in path and "transformer" not in path} == {
        "text_encoder/model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }
    for component in pair.components:
        assert_same(report.out / component, out / component)
    assert report.marker.raw["skeleton"] == {
        "source": "fused",
        "revision": None,
        "pipeline_class": "WanImageToVideoPipeline",
    }


@pytest.mark.parametrize("assets", ["hardlink", "symlink"])
def test_linked_side_files(pair: Inputs, out: Path, tmp_path: Path, assets: str) -> None:
    linked = pair.merge(tmp_path / "linked", assets=assets).out
    ours, theirs = tree(linked), tree(out)
    del ours[FILE_NAME], theirs[FILE_NAME]
    assert ours == theirs
    assert (linked / "vae" / "config.json").samefile(pair.skeleton / "vae" / "config.json")
    assert check(linked, digest=True).ok


def test_without_assets_only_weights_are_written(pair: Inputs, tmp_path: Path) -> None:
    skeleton = tmp_path / "configs"
    shutil.copytree(pair.skeleton, skeleton)
    shutil.rmtree(skeleton / "vae")
    bare = pair.merge(tmp_path / "bare", skeleton=skeleton, assets="skip").out
    assert all(SHARD.search(path) or INDEX in path for path in tree(bare) if path != FILE_NAME)
    with pytest.raises(Refused, match="has no files in vae/"):
        pair.merge(tmp_path / "whole", skeleton=skeleton)


@pytest.mark.parametrize(
    ("asked", "said", "wanted"),
    [
        ("keep", "float32", "bfloat16"),
        ("keep", "bfloat16", "bfloat16"),
        ("float16", "float32", "float16"),
    ],
)
def test_a_dtype_in_the_config_is_that_of_the_weights(
    pair: Inputs, tmp_path: Path, asked: str, said: str, wanted: str
) -> None:
    skeleton = Path(shutil.copytree(pair.skeleton, tmp_path / "skeleton"))
    edit_json(skeleton / "transformer" / "config.json", lambda found: found.update(torch_dtype=said))
    ours = pair.merge(tmp_path / "ours", skeleton=skeleton, dtype=asked).out
    first, second = (json.loads((ours / part / "config.json").read_text()) for part in pair.components)
    assert first == config(pair.size) | {"torch_dtype": wanted}
    assert second == config(pair.size)
    assert verify(ours, base=pair.native, loras=pair.loras, skeleton=skeleton).ok


# The marker and the fingerprint


def test_what_the_marker_says(pair: Inputs, out: Path) -> None:
    marker = read_marker(out)
    assert marker is not None
    raw = marker.raw
    assert raw["base"] == {
        "source": "native",
        "revision": None,
        "family": "wan",
        "layout": "native",
        "pipeline_class": None,
    }
    assert marker.layout == raw["layout"] == "diffusers"
    assert raw["skeleton"] == {
        "source": "skeleton",
        "revision": None,
        "pipeline_class": "WanImageToVideoPipeline",
    }
    assert [(name, part.role) for name, part in marker.components.items()] == [
        ("transformer", "high_noise"),
        ("transformer_2", "low_noise"),
    ]
    with pytest.raises(AssertionError, match="skeleton"):
        assert_valid({**raw, "skeleton": {}})


def test_an_output_that_is_not_converted_says_nothing_of_it(pair: Inputs, tmp_path: Path) -> None:
    marker = merge(pair.native, [pair.spec], tmp_path / "plain").marker
    assert marker.layout is None
    assert {"layout", "skeleton"}.isdisjoint(marker.raw)


def test_the_same_inputs_give_the_same_folder(pair: Inputs, out: Path, tmp_path: Path) -> None:
    moved = {
        name: Path(shutil.copytree(getattr(pair, name), tmp_path / "elsewhere" / name))
        for name in ("native", "skeleton")
    }
    again = pair.merge(tmp_path / "again", base=moved["native"], skeleton=moved["skeleton"], jobs=1).out
    assert tree(again) == tree(out)


def test_what_the_fingerprint_follows(pair: Inputs, out: Path, tmp_path: Path) -> None:
    ours = read_marker(out)
    assert ours is not None
    asked: dict[str, Any] = {"content": True}
    plain = plan(pair.native, [pair.spec], **asked)
    assert plain.fingerprint not in (None, ours.fingerprint)
    skeleton = Path(shutil.copytree(pair.skeleton, tmp_path / "skeleton"))
    edit_json(skeleton / "scheduler" / "scheduler_config.json", lambda found: found.update(flow_shift=5.0))
    asked |= {"layout": "diffusers", "skeleton": str(skeleton)}
    assert plan(pair.native, [pair.spec], **asked).fingerprint == ours.fingerprint
    shards = sorted((out / "transformer").glob("*.safetensors"))
    assert {read_header(path).metadata["fuselora.fingerprint"] for path in shards} == {ours.fingerprint}


def test_stacked_on_a_native_output(pair: Inputs, tmp_path: Path) -> None:
    first = merge(pair.native, [pair.spec], tmp_path / "first").out
    style = write_lora(tmp_path / "style.safetensors", pair.size, seed=30)
    with pytest.raises(Refused, match="already fused"):
        pair.merge(tmp_path / "second", [f"all={style}"], base=first)
    second = pair.merge(tmp_path / "second", [f"all={style}"], base=first, stack=True)
    assert len(second.marker.loras) == 4
    assert verify(second.out, base=first, loras=[style], skeleton=pair.skeleton).ok
    third = merge(second.out, [f"high={pair.loras[1]}"], tmp_path / "third", stack=True)
    assert third.marker.layout is None
    assert third.marker.raw["base"]["layout"] == "diffusers"  # type: ignore[index]


# What is refused, and when


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "diffusers"}, "--layout diffusers needs a skeleton"),
        ({"skeleton": "x"}, "--skeleton 'x' is given and no --layout"),
        (
            {"layout": "diffusers", "skeleton": "x", "variant": "fp16"},
            "--variant fp16 does not go with --layout",
        ),
    ],
)
def test_options_that_need_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        Request("base", (), **options)
    with pytest.raises(UsageError, match=f"^{message}$"):
        merge("base", ["lora.safetensors"], **options)


def test_a_layout_that_there_is_not(pair: Inputs) -> None:
    with pytest.raises(UsageError, match="layout is 'native'"):
        plan(pair.native, [pair.spec], layout="native", skeleton=pair.skeleton)


def test_faults_of_skeleton_and_lora_come_together_and_nothing_is_written(
    pair: Inputs, tmp_path: Path
) -> None:
    other = write_skeleton(tmp_path / "other", tiny("wan2.2-t2v-a14b"))
    with pytest.raises(Refused) as caught:
        pair.merge(tmp_path / "out", [str(pair.loras[0])], skeleton=other)
    assert {fault.kind for fault in caught.value.faults} >= {"components", "config"}
    assert len({fault.path for fault in caught.value.faults}) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


@pytest.mark.parametrize("where", ["", "inside", "vae/out"])
def test_out_in_the_skeleton(pair: Inputs, where: str) -> None:
    before = tree(pair.skeleton)
    with pytest.raises(OutputError, match=r"is( inside)? the input .*skeleton"):
        pair.merge(pair.skeleton / where, overwrite=True)
    assert tree(pair.skeleton) == before


def test_out_around_the_skeleton(pair: Inputs, tmp_path: Path) -> None:
    shutil.copytree(pair.skeleton, tmp_path / "out" / "skeleton")
    with pytest.raises(OutputError, match="contains the input"):
        pair.merge(tmp_path / "out", skeleton=tmp_path / "out" / "skeleton")


def test_a_full_disk_is_seen_first(pair: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr("fuselora.output.space.require", lambda folder, n_bytes: needed.append(n_bytes))
    report = pair.merge(tmp_path / "out")
    side = sum(path.stat().st_size for path in pair.skeleton.rglob("*") if path.is_file())
    assert needed == [report.plan.bytes_out + side]


# Killed, and run again


@dataclass
class Stopping:
    """Progress that calls ``act`` once ``n_bytes`` of the output are there."""

    n_bytes: int
    act: Callable[[], None]
    done: int = 0

    @contextmanager
    def phase(self, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        def advance(done: int) -> None:
            self.done += done
            if name == "fuse" and self.done > self.n_bytes:
                self.n_bytes = 1 << 60
                self.act()

        self.done = 0
        yield advance


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_rerun_goes_on_and_takes_the_skeleton_as_it_is_now(pair: Inputs, out: Path, tmp_path: Path) -> None:
    skeleton = Path(shutil.copytree(pair.skeleton, tmp_path / "skeleton"))
    planned = plan(pair.native, [pair.spec], layout="diffusers", skeleton=skeleton)
    first = [file.n_bytes for file in planned.files[:2]]
    with pytest.raises(KeyboardInterrupt):
        pair.merge(tmp_path / "ours", skeleton=skeleton, progress=Stopping(sum(first) + 1, interrupt))
    assert (tmp_path / "ours.partial" / JOURNAL_NAME).is_file()
    edit_json(skeleton / "scheduler" / "scheduler_config.json", lambda found: found.update(flow_shift=5.0))
    report = pair.merge(tmp_path / "ours", skeleton=skeleton)
    assert report.kept == tuple(str(file.path) for file in planned.files[:2])
    ours, whole = tree(report.out), tree(out)
    assert {path for path in ours if ours[path] != whole[path]} == {
        FILE_NAME,
        "scheduler/scheduler_config.json",
    }
    assert check(report.out, digest=True).ok


def test_an_interrupted_native_run_is_not_gone_on_with(pair: Inputs, tmp_path: Path) -> None:
    """Names are part of the plan: shards of the same LoRAs in native names are of no use."""
    size = plan(pair.native, [pair.spec]).files[0].n_bytes
    with pytest.raises(KeyboardInterrupt):
        merge(pair.native, [pair.spec], tmp_path / "ours", progress=Stopping(size + 1, interrupt))
    report = pair.merge(tmp_path / "ours")
    assert report.kept == ()
    assert not (report.out / "high_noise_model").exists()


def test_a_skeleton_file_that_changes_meanwhile(pair: Inputs, tmp_path: Path) -> None:
    skeleton = Path(shutil.copytree(pair.skeleton, tmp_path / "skeleton"))
    vae = skeleton / "vae" / "diffusion_pytorch_model.safetensors"

    def grow() -> None:
        vae.write_bytes(vae.read_bytes() + b"x")

    with pytest.raises(ChangedError, match=re.escape(str(vae))):
        pair.merge(tmp_path / "ours", skeleton=skeleton, progress=Stopping(1, grow))
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("digest", [True, False])
def test_an_output_is_replaced(pair: Inputs, out: Path, tmp_path: Path, digest: bool) -> None:
    ours = merge(pair.twin, [pair.spec], tmp_path / "ours").out
    assert pair.merge(ours, overwrite=True, digest=digest).out == ours
    assert set(tree(ours)) == set(tree(out))


# verify


def test_verify_recomputes_it(pair: Inputs, out: Path) -> None:
    report = verify(out, base=pair.native, loras=pair.loras, skeleton=pair.skeleton)
    assert report.ok
    assert [part.fused for part in report.components] == [69, 69]


def test_diffusers_loads_it(out: Path) -> None:
    assert verify(out, load=True).ok


def test_verify_names_a_flipped_bit_as_the_folder_does(pair: Inputs, tmp_path: Path) -> None:
    ours = pair.merge(tmp_path / "ours", [f"high={pair.loras[0]}"], digest=False).out
    key = "blocks.1.scale_shift_table"
    for part, code in (("transformer", "bound"), ("transformer_2", "copied")):
        shard = next(p for p in (ours / part).glob("*.safetensors") if key in read_header(p).by_name())
        flip_bit(shard, key, 30)
        report = verify(ours, base=pair.native, loras=pair.loras[:1])
        assert found(report) >= {(code, key)}
        assert any(shard.relative_to(ours).as_posix() == finding.file for finding in report.findings)


def test_verify_sees_two_tensors_in_each_others_place(pair: Inputs, tmp_path: Path) -> None:
    """Native norm3 is norm2 here; a name that was left as it was would be another tensor's."""
    ours = pair.merge(tmp_path / "ours", [f"high={pair.loras[0]}"], digest=False).out
    for shard in (ours / "transformer_2").glob("*.safetensors"):
        content = shard.read_bytes()
        swapped = content.replace(b"blocks.0.norm2.", b"blocks.0.norm9.")
        shard.write_bytes(swapped.replace(b"blocks.1.norm2.", b"blocks.0.norm2.").replace(b"norm9", b"norm2"))
    codes = {finding.code for finding in verify(ours, base=pair.native, loras=pair.loras[:1]).findings}
    assert "tensor" in codes


def test_verify_sees_a_name_that_was_left_as_it_was(pair: Inputs, tmp_path: Path) -> None:
    ours = pair.merge(tmp_path / "ours", [f"high={pair.loras[0]}"], digest=False).out
    after, before = b'"blocks.0.modulation"', b'"blocks.0.scale_shift_table"'
    for shard in (ours / "transformer_2").glob("*.safetensors"):
        header = read_header(shard)
        content = shard.read_bytes()
        start = content[: header.data_start].replace(before, after).ljust(header.data_start, b" ")
        shard.write_bytes(start + content[header.data_start :])
    findings = found(verify(ours, base=pair.native, loras=pair.loras[:1]))
    assert findings >= {("tensor", "blocks.0.modulation")}


def test_verify_against_another_base(pair: Inputs, out: Path, tmp_path: Path) -> None:
    (finding,) = verify(out, base=pair.twin, loras=pair.loras).findings
    assert finding.code == "another-base"
    assert finding.message.startswith("has no native names")
    other = write_native(tmp_path / "other", pair.size, experts=True, dtype="BF16", mixed=True, seed=9)
    assert {f.code for f in verify(out, base=other, loras=pair.loras).findings} >= {"another-base", "bound"}


def test_verify_compares_the_rest_with_the_skeleton(pair: Inputs, out: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(pair.skeleton, tmp_path / "other"))
    edit_json(other / "vae" / "config.json", lambda document: document.update(z_dim=1))
    (other / "tokenizer" / "tokenizer_config.json").unlink()
    findings = verify(out, base=pair.native, loras=pair.loras, skeleton=other).findings
    assert {(finding.code, finding.file, finding.message) for finding in findings} == {
        ("side-file", "vae/config.json", "is not the skeleton's file"),
        ("side-file", "tokenizer/tokenizer_config.json", "the skeleton has no such file"),
    }


def test_verify_says_that_side_files_are_not_compared(pair: Inputs, out: Path, tmp_path: Path) -> None:
    line = "side files not compared: no --skeleton"
    report = verify(out, base=pair.native, loras=pair.loras)
    assert report.ok
    assert line in report.lines()
    assert report.document()["not_compared"] == [line]
    bare = pair.merge(tmp_path / "bare", assets="skip").out
    for told in (
        verify(out, base=pair.native, loras=pair.loras, skeleton=pair.skeleton),
        verify(bare, base=pair.native, loras=pair.loras),
        verify(out),
    ):
        assert line not in told.lines()
        assert told.document()["not_compared"] == []


def test_verify_refuses_a_skeleton_that_means_nothing(
    pair: Inputs, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="a skeleton was given and no base"):
        verify(out, skeleton=pair.skeleton)
    plain = merge(pair.native, [pair.spec], tmp_path / "plain").out
    monkeypatch.setattr("fuselora.verify.check", None)  # before any byte is digested
    with pytest.raises(UsageError, match="speaks of none"):
        verify(plain, base=pair.native, loras=pair.loras, skeleton=pair.skeleton)


def test_verify_a_marker_that_hides_the_conversion(pair: Inputs, tmp_path: Path) -> None:
    ours = pair.merge(tmp_path / "ours", digest=False).out
    edit_marker(ours, lambda document: document.pop("layout"))
    codes = {finding.code for finding in verify(ours, base=pair.native, loras=pair.loras).findings}
    assert "another-base" in codes


# The command line


def command(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fuselora", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_plan_and_inspect_say_so(pair: Inputs, out: Path) -> None:
    options = (
        "--base",
        pair.native,
        "--lora",
        pair.spec,
        "--layout",
        "diffusers",
        "--skeleton",
        pair.skeleton,
    )
    said = command("plan", *options)
    assert said.returncode == 0, said.stderr
    assert "native: no published size (wan, native names)\n" in said.stdout
    assert "written as a diffusers WanImageToVideoPipeline, all but the weights from skeleton" in said.stdout
    document = json.loads(command("plan", "--json", *options).stdout)
    assert document["layout"] == "diffusers"
    assert document["skeleton"] == {"source": "skeleton", "revision": None}
    assert document["base"]["layout"] == "native"
    assert "to diffusers names, the rest from skeleton" in command("inspect", out).stdout
    (entry,) = json.loads(command("inspect", "--json", out).stdout)["files"]
    assert (entry["layout"], entry["skeleton"]["source"]) == ("diffusers", "skeleton")


def test_usage_ends_with_2_and_a_refusal_with_1(pair: Inputs, tmp_path: Path) -> None:
    options = ("--base", pair.native, "--lora", pair.spec, "--out", tmp_path / "out")
    half = command("merge", *options, "--layout", "diffusers")
    assert (half.returncode, half.stdout) == (2, "")
    assert "--layout diffusers needs a skeleton" in half.stderr
    assert command("merge", *options, "--layout", "native", "--skeleton", pair.skeleton).returncode == 2
    refused = command("merge", "--json", *options, "--layout", "diffusers", "--skeleton", pair.native)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["code"] == "checkpoint"
    assert not (tmp_path / "out").exists()


def test_the_readmes_example(tmp_path: Path) -> None:
    """The folders and files that it names, as tiny ones."""
    section = (ROOT / "README.md").read_text().partition("## A native base as a diffusers pipeline\n")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    lines = [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("fuselora ")]
    assert [shlex.split(line)[1] for line in lines] == ["merge", "verify"]
    size = tiny("wan2.2-i2v-a14b", blocks=1)
    write_native(tmp_path / "Wan2.2-I2V-A14B", size, experts=True)
    write_skeleton(tmp_path / "Wan2.2-I2V-A14B-Diffusers", size, experts=True)
    for number, name in enumerate(("high.safetensors", "low.safetensors")):
        write_lora(tmp_path / name, size, seed=number)
    for line in lines:
        done = command(*shlex.split(line)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert fuselora.marker.read_marker(tmp_path / "Wan2.2-I2V-4steps") is not None
