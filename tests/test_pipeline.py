"""merge and plan from end to end, as a library: what is written, what is kept, what is refused."""

from __future__ import annotations

import errno
import json
import os
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
from fuselora import pipeline, synth
from fuselora.errors import CheckpointError, OutputError, ReadError, Refused, UsageError
from fuselora.families.wan import WAN
from fuselora.marker import read_marker
from fuselora.pipeline import FuseReport, merge, plan, request
from fuselora.specs import AlphaSpec, LoraSpec, Request
from fuselora.steps import Fuse
from fuselora.synth import (
    tiny,
    write_file,
    write_lora,
    write_native,
    write_pipeline,
    write_safetensors,
)
from tests.inputs import pair, tensor

SIZE = tiny("wan2.2-t2v-a14b", blocks=1)
SHARD_BYTES = 60_000
Q = "blocks.0.attn1.to_q.weight"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


@dataclass(frozen=True)
class Inputs:
    """A pair of experts in float32 and bfloat16, one transformer, and LoRAs by name."""

    folder: Path
    base: Path
    half: Path
    single: Path

    def lora(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    @property
    def both(self) -> list[str]:
        return [f"{self.lora('a')},{self.lora('b')}"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    made = Inputs(
        folder,
        write_pipeline(folder / "base", SIZE, experts=True, shard_bytes=SHARD_BYTES),
        write_pipeline(
            folder / "half", SIZE, experts=True, dtype="BF16", mixed=True, shard_bytes=SHARD_BYTES
        ),
        write_pipeline(folder / "single", SIZE),
    )
    for seed, name in enumerate("abc", start=5):
        write_lora(made.lora(name), SIZE, style="lightning", alpha=2, dtype="F32", seed=seed)
    write_safetensors(made.lora("nan"), pair(Q.removesuffix(".weight"), 48, 48, value=float("nan")))
    return made


@pytest.fixture(autouse=True)
def same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights(component: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(component.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def delta(lora: Path, module: str = "diffusion_model.blocks.0.self_attn.q") -> torch.Tensor:
    """The delta of one module at strength 1: alpha is 2 and the rank 4."""
    tensors = load_file(lora)
    up, down = tensors[f"{module}.lora_up.weight"], tensors[f"{module}.lora_down.weight"]
    return (up.double() @ down.double()) * 0.5


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float = 1e-6) -> bool:
    return torch.allclose(found.double(), wanted.double(), rtol=0, atol=atol)


@dataclass
class Stopping:
    """Progress that raises ``error`` once ``files`` output files are whole."""

    error: BaseException
    files: list[int]
    done: int = 0

    @contextmanager
    def phase(self, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        def advance(done: int) -> None:
            self.done += done
            if name == "fuse" and self.done > sum(self.files):
                raise self.error

        self.done = 0
        yield advance


@dataclass
class Watched:
    """Progress that remembers: for each phase, the bytes announced and done."""

    phases: dict[str, list[int]]

    @contextmanager
    def phase(self, name: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
        seen = self.phases.setdefault(name, [n_bytes, 0])

        def advance(done: int) -> None:
            seen[1] += done

        yield advance


# What is written


def test_a_pair_by_a_list(inputs: Inputs, tmp_path: Path) -> None:
    report = merge(inputs.base, inputs.both, tmp_path / "out")
    assert report.out == tmp_path / "out"
    assert (report.kept, report.notices) == ((), ())
    assert set(tree(report.out)) == {*tree(inputs.base), "fused.json"}
    for name, component in (("a", "transformer"), ("b", "transformer_2")):
        before, after = weights(inputs.base / component), weights(report.out / component)
        assert before.keys() == after.keys()
        assert close(after[Q], before[Q].double() + delta(inputs.lora(name)))
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert len(changed) == 10
        assert all(key.startswith("blocks.0.") and key.endswith(".weight") for key in changed)
    for path, content in tree(inputs.base).items():
        if not path.startswith("transformer") or path.endswith("config.json"):
            assert (report.out / path).read_bytes() == content, path


def test_the_marker_on_disk_is_the_report_s(inputs: Inputs, tmp_path: Path) -> None:
    report = merge(inputs.base, inputs.both, tmp_path / "out")
    assert read_marker(tmp_path / "out") == report.marker
    assert report.marker.fingerprint == report.plan.fingerprint
    assert [(lora.name, lora.component) for lora in report.marker.loras] == [
        ("a.safetensors", "transformer"), ("b.safetensors", "transformer_2"),
    ]  # fmt: skip
    assert {name: part.fused for name, part in report.marker.components.items()} == {
        "transformer": 10, "transformer_2": 10,
    }  # fmt: skip


def test_several_loras_on_one_expert_are_summed_in_order(inputs: Inputs, tmp_path: Path) -> None:
    texts = [f"high={inputs.lora('c')}", f"high={inputs.lora('a')}:0.5", f"high={inputs.lora('b')}:-1"]
    report = merge(inputs.base, texts, tmp_path / "out")
    (step,) = [
        step
        for file in report.plan.files
        for step in file.steps
        if isinstance(step, Fuse) and step.base_key == Q and step.deltas
    ]
    added = [d for d in step.deltas if d.kind.name == "pair"]
    assert [d.factors["up"].path.stem for d in added] == ["c", "a", "b"]
    assert [d.scale for d in added] == [0.5, 0.25, -0.5]
    c, a, b = (delta(inputs.lora(name)) for name in "cab")
    wanted = weights(inputs.base / "transformer")[Q].double() + c + 0.5 * a - b
    assert close(weights(report.out / "transformer")[Q], wanted)
    assert [(lora.name, lora.strength) for lora in report.marker.loras] == [
        ("c.safetensors", 1.0), ("a.safetensors", 0.5), ("b.safetensors", -1.0),
    ]  # fmt: skip


def test_each_expert_has_its_own_strength(inputs: Inputs, tmp_path: Path) -> None:
    out = merge(inputs.base, [f"{inputs.lora('a')}:0.5,{inputs.lora('b')}:2"], tmp_path / "out").out
    for name, component, strength in (("a", "transformer", 0.5), ("b", "transformer_2", 2.0)):
        wanted = weights(inputs.base / component)[Q].double() + strength * delta(inputs.lora(name))
        assert close(weights(out / component)[Q], wanted)


def test_one_lora_for_both(inputs: Inputs, tmp_path: Path) -> None:
    out = merge(inputs.base, [f"all={inputs.lora('a')}"], tmp_path / "out").out
    for component in ("transformer", "transformer_2"):
        assert close(
            weights(out / component)[Q],
            weights(inputs.base / component)[Q].double() + delta(inputs.lora("a")),
        )


def test_the_other_expert_is_copied_byte_for_byte(inputs: Inputs, tmp_path: Path) -> None:
    report = merge(inputs.base, [f"high={inputs.lora('a')}"], tmp_path / "out")
    copied = {k: v for k, v in tree(inputs.base / "transformer_2").items() if k != INDEX}
    assert {k: v for k, v in tree(report.out / "transformer_2").items() if k != INDEX} == copied
    part = report.marker.components["transformer_2"]
    assert (part.fused, part.dtype) == (0, "float32")
    index, before = (
        json.loads((at / "transformer_2" / INDEX).read_text()) for at in (report.out, inputs.base)
    )
    assert index == before


@pytest.mark.parametrize("uniform", [False, True])
def test_both_experts_are_cast(inputs: Inputs, tmp_path: Path, uniform: bool) -> None:
    loras = [f"high={inputs.lora('a')}"]
    report = merge(inputs.base, loras, tmp_path / "out", dtype="bfloat16", uniform=uniform)
    for component in ("transformer", "transformer_2"):
        assert report.marker.components[component].dtype == "bfloat16"
        before, after = weights(inputs.base / component), weights(report.out / component)
        kept = {key for key, found in after.items() if found.dtype == torch.float32}
        assert kept == (
            {key for key in before if WAN.keeps_float32(key, "diffusers")} if not uniform else set()
        )
        changed = {key for key, found in after.items() if not torch.equal(found, before[key].to(found.dtype))}
        assert len(changed) == (10 if component == "transformer" else 0)
    total = sum(t.numel() * t.element_size() for t in weights(report.out / "transformer").values())
    assert json.loads((report.out / "transformer" / INDEX).read_text())["metadata"]["total_size"] == total


def test_uniform_is_needed_to_touch_what_the_model_keeps(inputs: Inputs, tmp_path: Path) -> None:
    keep = merge(inputs.half, inputs.both, tmp_path / "keep").out
    cast = merge(inputs.half, inputs.both, tmp_path / "cast", dtype="bfloat16").out
    assert {t.dtype for t in weights(keep / "transformer").values()} == {torch.bfloat16, torch.float32}
    for component in ("transformer", "transformer_2"):
        for name in {p.name for p in (keep / component).glob("*.safetensors")}:
            here, there = load_file(keep / component / name), load_file(cast / component / name)
            assert all(
                torch.equal(here[key], there[key]) and here[key].dtype == there[key].dtype for key in here
            )


def test_a_config_that_names_a_dtype_follows(inputs: Inputs, tmp_path: Path) -> None:
    base = write_pipeline(tmp_path / "base", SIZE)
    path = base / "transformer" / "config.json"
    text = '{"torch_dtype" : "float32", "dtype":"float32", "note": "torch_dtype"}\n'
    path.write_text(text)
    kept = merge(base, [inputs.lora("a")], tmp_path / "kept").out
    assert (kept / "transformer" / "config.json").read_text() == text
    cast = merge(base, [inputs.lora("a")], tmp_path / "cast", dtype="float16")
    found = (cast.out / "transformer" / "config.json").read_text()
    assert found == text.replace('"float32"', '"float16"')
    assert "transformer/config.json" in {record.path for record in cast.marker.side_files}
    assert path.read_text() == text


def test_one_file_gives_that_file_and_a_marker(inputs: Inputs, tmp_path: Path) -> None:
    path = write_file(tmp_path / "wan.v1.safetensors", SIZE, dtype="F32")
    (tmp_path / "beside.json").write_text("{}")
    out = merge(path, [inputs.lora("a")], tmp_path / "out").out
    assert set(tree(out)) == {"wan.v1.safetensors", "fused.json"}
    before, after = load_file(path), load_file(out / "wan.v1.safetensors")
    assert before.keys() == after.keys()
    key = "model.diffusion_model.blocks.0.self_attn.q.weight"
    assert close(after[key], before[key].double() + delta(inputs.lora("a")))


def test_a_native_pair_keeps_its_folders(inputs: Inputs, tmp_path: Path) -> None:
    base = write_native(tmp_path / "base", SIZE, experts=True, shard_bytes=SHARD_BYTES)
    out = merge(base, inputs.both, tmp_path / "out").out
    assert set(tree(out)) == {*tree(base), "fused.json"}
    assert {path.parent.name for path in out.glob("*/*.safetensors")} == {
        "high_noise_model",
        "low_noise_model",
    }
    key = "blocks.0.self_attn.q.weight"
    for name, folder in (("a", "high_noise_model"), ("b", "low_noise_model")):
        assert close(
            weights(out / folder)[key], weights(base / folder)[key].double() + delta(inputs.lora(name))
        )


def test_one_native_folder(inputs: Inputs, tmp_path: Path) -> None:
    base = write_native(tmp_path / "base", SIZE, shard_bytes=SHARD_BYTES)
    out = merge(base, [inputs.lora("a")], tmp_path / "out").out
    assert set(tree(out)) == {*tree(base), "fused.json"}
    assert (out / "Wan2.1_VAE.pth").read_bytes() == (base / "Wan2.1_VAE.pth").read_bytes()


def test_two_runs_in_two_places_write_the_same_bytes(inputs: Inputs, tmp_path: Path) -> None:
    first = merge(inputs.base, inputs.both, tmp_path / "one", dtype="bfloat16").out
    second = merge(inputs.base, inputs.both, tmp_path / "deep" / "er" / "two", dtype="bfloat16", jobs=1).out
    assert tree(first) == tree(second)


def test_the_base_and_the_loras_are_left_alone(inputs: Inputs, tmp_path: Path) -> None:
    base = write_pipeline(tmp_path / "base", SIZE, shard_bytes=SHARD_BYTES)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_mode) for path in base.rglob("*")}
    content = tree(base)
    for path in [*before, base]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    modes = {path: path.stat().st_mode for path in before}
    out = merge(base, [inputs.lora("a")], tmp_path / "out").out
    assert {path: path.stat().st_mode for path in base.rglob("*")} == modes
    assert {path: path.stat().st_mtime_ns for path in base.rglob("*")} == {
        p: t for p, (t, _) in before.items()
    }
    assert tree(base) == content
    assert all(os.access(path, os.W_OK) for path in out.rglob("*"))


# The rest of a pipeline


def links(out: Path) -> tuple[set[str], set[str]]:
    """(symbolic links, files with several names)"""
    files = [path for path in out.rglob("*") if path.is_file()]
    symbolic = {str(path.relative_to(out)) for path in files if path.is_symlink()}
    hard = {str(p.relative_to(out)) for p in files if not p.is_symlink() and p.stat().st_nlink > 1}
    return symbolic, hard


SIDE = {
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer_config.json",
    "transformer/config.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}


@pytest.mark.parametrize("assets", ["copy", "hardlink", "symlink", "skip"])
def test_assets(inputs: Inputs, tmp_path: Path, assets: str) -> None:
    base = write_pipeline(tmp_path / "base", SIZE)
    report = merge(base, [inputs.lora("a")], tmp_path / "out", assets=assets)
    symbolic, hard = links(report.out)
    there = set(tree(report.out)) - {"fused.json", "transformer/diffusion_pytorch_model.safetensors"}
    assert symbolic == (SIDE if assets == "symlink" else set())
    assert hard == (SIDE if assets == "hardlink" else set())
    assert there == (set() if assets == "skip" else SIDE)
    assert {record.path for record in report.marker.side_files} == there
    assert {record.link for record in report.marker.side_files} <= {assets if "link" in assets else None}


# Runs that end early


def shard_sizes(report: FuseReport) -> list[int]:
    return [file.n_bytes for file in report.plan.files]


@pytest.fixture(scope="module")
def whole(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> FuseReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        return merge(inputs.base, inputs.both, tmp_path_factory.mktemp("whole") / "out")


@pytest.mark.parametrize("error", [OutputError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("finished", [1, 3])
def test_a_rerun_keeps_finished_shards(
    inputs: Inputs, whole: FuseReport, tmp_path: Path, error: BaseException, finished: int
) -> None:
    sizes = shard_sizes(whole)
    assert len(sizes) > 4
    out = tmp_path / "out"
    with pytest.raises(type(error)):
        merge(inputs.base, inputs.both, out, progress=Stopping(error, sizes[:finished]))
    assert not out.exists()
    assert (tmp_path / "out.partial").is_dir()
    report = merge(inputs.base, inputs.both, out)
    assert report.kept == tuple(str(file.path) for file in whole.plan.files[:finished])
    assert tree(out) == tree(whole.out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_message_says_that_a_rerun_goes_on(inputs: Inputs, whole: FuseReport, tmp_path: Path) -> None:
    stop = Stopping(OutputError("no space left"), shard_sizes(whole)[:1])
    with pytest.raises(OutputError) as caught:
        merge(inputs.base, inputs.both, tmp_path / "out", progress=stop)
    assert caught.value.hint is not None
    assert "out.partial keeps what is finished" in caught.value.hint


def test_restart_forgets_finished_shards(inputs: Inputs, whole: FuseReport, tmp_path: Path) -> None:
    out, stop = tmp_path / "out", Stopping(OutputError("no space"), shard_sizes(whole)[:2])
    with pytest.raises(OutputError):
        merge(inputs.base, inputs.both, out, progress=stop)
    assert merge(inputs.base, inputs.both, out, restart=True).kept == ()
    assert tree(out) == tree(whole.out)


def test_another_plan_keeps_nothing(inputs: Inputs, whole: FuseReport, tmp_path: Path) -> None:
    out, stop = tmp_path / "out", Stopping(OutputError("no space"), shard_sizes(whole)[:2])
    with pytest.raises(OutputError):
        merge(inputs.base, [f"all={inputs.lora('a')}"], out, progress=stop)
    assert merge(inputs.base, inputs.both, out).kept == ()
    assert tree(out) == tree(whole.out)


def test_a_damaged_shard_is_not_kept(inputs: Inputs, whole: FuseReport, tmp_path: Path) -> None:
    out, stop = tmp_path / "out", Stopping(OutputError("no space"), shard_sizes(whole)[:2])
    with pytest.raises(OutputError):
        merge(inputs.base, inputs.both, out, progress=stop)
    first, second = (str(file.path) for file in whole.plan.files[:2])
    with (tmp_path / "out.partial" / first).open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")
    assert merge(inputs.base, inputs.both, out).kept == (second,)
    assert tree(out) == tree(whole.out)


def test_without_digests_nothing_is_kept(inputs: Inputs, whole: FuseReport, tmp_path: Path) -> None:
    stop = Stopping(OutputError("no space"), shard_sizes(whole)[:2])
    with pytest.raises(OutputError) as caught:
        merge(inputs.base, inputs.both, tmp_path / "out", progress=stop, digest=False)
    assert caught.value.hint is None
    assert list(tmp_path.iterdir()) == []


def test_without_digests_the_marker_has_none(inputs: Inputs, whole: FuseReport, tmp_path: Path) -> None:
    report = merge(inputs.base, inputs.both, tmp_path / "out", digest=False)
    assert report.marker.artifact is None
    assert {record.sha256 for record in report.marker.files} == {None}
    assert {lora.sha256 for lora in report.marker.loras} == {None}
    assert all(lora.content_sha256 for lora in report.marker.loras)
    assert report.marker.fingerprint == whole.marker.fingerprint
    here, there = tree(report.out), tree(whole.out)
    assert {k for k in here if here[k] != there[k]} == {"fused.json"}


# OUT


def test_an_existing_output_is_replaced_only_when_asked(inputs: Inputs, tmp_path: Path) -> None:
    out = merge(inputs.single, [inputs.lora("a")], tmp_path / "out").out
    before = tree(out)
    with pytest.raises(OutputError, match="holds a fused checkpoint") as caught:
        merge(inputs.single, [inputs.lora("b")], out)
    assert caught.value.hint is not None and "--overwrite" in caught.value.hint
    assert tree(out) == before
    report = merge(inputs.single, [inputs.lora("b")], out, overwrite=True)
    assert [lora.name for lora in report.marker.loras] == ["b.safetensors"]
    assert tree(out) != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_ours_is_never_replaced(inputs: Inputs, tmp_path: Path, overwrite: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("x")
    with pytest.raises(OutputError, match=r"precious\.txt"):
        merge(inputs.single, [inputs.lora("a")], out, overwrite=overwrite)
    assert tree(out) == {"precious.txt": b"x"}


def test_an_empty_folder_is_filled(inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    out = merge(inputs.single, [inputs.lora("a")], tmp_path / "out").out
    assert (out / "fused.json").is_file()


@pytest.mark.parametrize("place", ["base/out", "base", "base/transformer/out", "."])
def test_out_is_apart_from_the_base(inputs: Inputs, tmp_path: Path, place: str) -> None:
    base = write_pipeline(tmp_path / "base", SIZE)
    before = tree(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            merge(base, [inputs.lora("a")], tmp_path / place, overwrite=overwrite)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Wan2.2-tiny", "Wan2.2-tiny-fused"),
        ("a.b.c", "a.b.c-fused"),
        ("models--o--Wan2.2/snapshots/abc", "Wan2.2-fused"),
    ],
)
def test_out_is_named_after_the_base(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, name: str
) -> None:
    base = write_pipeline(tmp_path / folder, SIZE)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert merge(base, [inputs.lora("a")]).out.resolve() == tmp_path / "work" / name
    assert [path.name for path in Path.cwd().iterdir()] == [name]


def test_out_is_named_after_the_file(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "wan.v1.safetensors", SIZE)
    monkeypatch.chdir(tmp_path)
    assert merge(path, [inputs.lora("a")]).out.name == "wan.v1-fused"


# Refusals


@pytest.mark.parametrize(
    "loras",
    [["a"], ["high=a", "high=a"], ["a,b,c"], ["unet=a"], ["high=nan"]],
    ids=lambda loras: " ".join(loras),
)
def test_a_refusal_leaves_nothing(inputs: Inputs, tmp_path: Path, loras: list[str]) -> None:
    texts = []
    for text in loras:
        head, equals, names = text.rpartition("=")
        texts.append(head + equals + ",".join(str(inputs.lora(name)) for name in names.split(",")))
    with pytest.raises(Refused) as caught:
        merge(inputs.base, texts, tmp_path / "deep" / "out")
    assert caught.value.faults
    assert list(tmp_path.iterdir()) == []


def test_faults_of_several_files_come_together(inputs: Inputs, tmp_path: Path) -> None:
    half = write_safetensors(tmp_path / "half.safetensors", pair("x")[:1])
    other = write_safetensors(tmp_path / "other.safetensors", [tensor("x.scalar", 1)])
    with pytest.raises(Refused) as caught:
        plan(inputs.base, [f"high={half}", other, "unet=" + str(inputs.lora("a"))])
    assert [(f.kind, f.path) for f in caught.value.faults] == [
        ("half_pair", "half.safetensors"),
        ("unsupported", "other.safetensors"),
        ("untargeted", "other.safetensors"),
        ("no_component", "a.safetensors"),
    ]


def test_an_alpha_for_a_lora_that_has_one(inputs: Inputs) -> None:
    with pytest.raises(Refused, match="applies to no module"):
        plan(inputs.single, [inputs.lora("a")], alphas=[8])


def test_two_experts_of_which_one_is_gone(inputs: Inputs, tmp_path: Path) -> None:
    base = write_pipeline(tmp_path / "base", SIZE, experts=True)
    (base / "transformer_2").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="transformer_2"):
        merge(base, [inputs.lora("a")], tmp_path / "out")


# Arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtyp": "bfloat16"}, "dtyp"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
        ({"dtype": torch.bfloat16}, "dtype is torch.bfloat16"),
        ({"kernel": "fast"}, "kernel is 'fast'"),
        ({"assets": None}, "assets is None"),
        ({"jobs": 0}, "jobs is 0"),
        ({"jobs": -1}, "jobs is -1"),
        ({"jobs": "2"}, "jobs is '2'"),
        ({"alpha": ["3"]}, "there is no option alpha"),
        ({"alphas": ["eight"]}, "eight"),
        ({"revision": "main"}, "--revision 'main'"),
    ],
)
def test_arguments_that_make_no_sense(
    inputs: Inputs, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        merge(inputs.single, [inputs.lora("a")], tmp_path / "out", **options)
    assert said in caught.value.message
    with pytest.raises(UsageError):
        plan(inputs.single, [inputs.lora("a")], **options)
    assert list(tmp_path.iterdir()) == []


def test_a_merge_needs_a_lora(inputs: Inputs) -> None:
    with pytest.raises(UsageError, match="no LoRA"):
        plan(inputs.single, [])


def test_a_request_as_a_library_call_writes_it() -> None:
    spec = LoraSpec("y", 0.5, "transformer")
    assert request(
        "b", ["high=x:2", spec], "o", alphas=["y=8", AlphaSpec(1.0)], allow_unmatched=["t.*"]
    ) == Request(
        base="b",
        loras=(LoraSpec("x", 2.0, "transformer"), spec),
        out=Path("o"),
        alphas=(AlphaSpec(8.0, "y"), AlphaSpec(1.0)),
        allow_unmatched=("t.*",),
    )


def test_an_unknown_option_says_which_was_meant() -> None:
    with pytest.raises(UsageError) as caught:
        request("b", "x", lora_layout="native")
    assert caught.value.hint == "Did you mean lora_layouts?"


def test_out_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert request("b", "x", "~/out").out == tmp_path / "out"
    (tmp_path / "~").mkdir()
    monkeypatch.chdir(tmp_path)
    assert request("b", "x", "~/out").out == Path("~/out")


def test_one_value_is_a_list_of_one() -> None:
    asked = request(Path("b"), "x", alphas=8, allow_unmatched="text_encoder.*")
    assert (asked.base, asked.loras, asked.out) == ("b", (LoraSpec("x"),), None)
    assert (asked.alphas, asked.allow_unmatched) == ((AlphaSpec(8.0),), ("text_encoder.*",))
    assert request("b", Path("x")).loras == (LoraSpec("x"),)  # type: ignore[arg-type]


def test_a_time_that_is_no_time(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
        merge(inputs.single, [inputs.lora("a")], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_time_is_recorded(inputs: Inputs, tmp_path: Path) -> None:
    report = merge(inputs.single, [inputs.lora("a")], tmp_path / "out")
    assert report.marker.raw["created"] == "2023-11-14T22:13:20Z"


# Plans


def test_a_plan_writes_nothing_and_knows_what_it_did_not_read(inputs: Inputs, tmp_path: Path) -> None:
    found = plan(inputs.base, inputs.both, tmp_path / "out")
    assert (found.fingerprint, found.contents) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_with_content_is_the_merge_s(inputs: Inputs, whole: FuseReport) -> None:
    found = plan(inputs.base, inputs.both, content=True)
    assert found.fingerprint == whole.plan.fingerprint
    assert found.files == whole.plan.files
    assert found.contents == whole.plan.contents


def test_only_a_plan_with_content_sees_the_values(inputs: Inputs) -> None:
    loras = [f"high={inputs.lora('nan')}"]
    assert plan(inputs.base, loras).fingerprint is None
    with pytest.raises(Refused, match="NaN or infinity"):
        plan(inputs.base, loras, content=True)


@pytest.mark.parametrize("how", ["import fuselora; plan = fuselora.plan", "from fuselora import plan"])
def test_the_package_s_plan_is_a_function_and_stays_one(inputs: Inputs, how: str) -> None:
    call = f"assert plan({str(inputs.base)!r}, {inputs.both!r}).files"
    code = f"{how}; {call}; {how}; {call}; import fuselora; assert fuselora.plan is plan"
    subprocess.run([sys.executable, "-c", code], check=True)


# Stacking


def test_a_second_lora_on_a_fused_base(inputs: Inputs, tmp_path: Path) -> None:
    first = merge(inputs.single, [inputs.lora("a")], tmp_path / "one")
    with pytest.raises(Refused, match="already fused"):
        merge(first.out, [inputs.lora("b")], tmp_path / "two")
    with pytest.raises(Refused, match="already fused into transformer of this base"):
        merge(first.out, [inputs.lora("a")], tmp_path / "two", stack=True)
    second = merge(first.out, [inputs.lora("b")], tmp_path / "two", stack=True)
    assert [lora.name for lora in second.marker.loras] == ["a.safetensors", "b.safetensors"]
    assert second.marker.stacked_on == first.marker.fingerprint
    wanted = (
        weights(inputs.single / "transformer")[Q].double() + delta(inputs.lora("a")) + delta(inputs.lora("b"))
    )
    assert close(weights(second.out / "transformer")[Q], wanted)


# Progress and notices


def test_progress_is_told_every_byte(inputs: Inputs, tmp_path: Path) -> None:
    watched = Watched({})
    report = merge(inputs.base, inputs.both, tmp_path / "out", progress=watched)
    assert list(watched.phases) == ["read LoRAs", "fuse"]
    announced, done = watched.phases["fuse"]
    assert announced == done
    side = sum(
        record.n_bytes for record in report.marker.side_files if "index" not in record.path.split("/")[-1]
    )
    assert done >= report.plan.bytes_out
    assert done - report.plan.bytes_out >= side
    announced, done = watched.phases["read LoRAs"]
    assert 0 < done <= announced


def test_notices_are_kept_in_the_marker(inputs: Inputs, tmp_path: Path) -> None:
    lora = write_safetensors(
        tmp_path / "z.safetensors",
        [*pair("blocks.0.attn1.to_q", 48, 48), tensor("blocks.0.attn1.to_k.diff_b", 48, value=0.0)],
    )
    report = merge(inputs.single, [lora], tmp_path / "out")
    assert [notice.code for notice in report.notices] == ["zero_delta"]
    assert report.marker.raw["warnings"] == [
        {
            "code": "zero_delta",
            "lora": "z.safetensors",
            "message": report.notices[0].message,
            "of": 2,
            "zero": 1,
        }
    ]


def test_the_package_offers_its_functions() -> None:
    assert (fuselora.merge, fuselora.plan) == (pipeline.merge, pipeline.plan)
    assert fuselora.read_marker is read_marker
    assert all(getattr(fuselora, name) for name in fuselora.__all__)
    with pytest.raises(AttributeError, match="unmerge"):
        _ = fuselora.unmerge


def test_a_scale_beyond_float32_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    size = synth.tiny("wan2.2-t2v-a14b", blocks=1)
    base = synth.write_file(tmp_path / "base.safetensors", size)
    lora = synth.write_lora(tmp_path / "lora.safetensors", size)
    with pytest.raises(Refused, match="does not fit float32"):
        merge(base, [f"{lora}:1e39"], tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {base.name, lora.name}


def test_a_lora_that_lies_in_the_base_folder_does_not_come_along(tmp_path: Path) -> None:
    size = synth.tiny("wan2.2-t2v-a14b", blocks=1)
    base = synth.write_pipeline(tmp_path / "base", size)
    lora = synth.write_lora(base / "lora.safetensors", size)
    merge(base, [str(lora)], tmp_path / "out")
    assert (tmp_path / "out" / "model_index.json").is_file()
    assert not (tmp_path / "out" / lora.name).exists()


def test_a_list_does_not_hide_a_lora_given_twice_on_one_expert(tmp_path: Path) -> None:
    size = synth.tiny("wan2.2-t2v-a14b", blocks=1)
    base = synth.write_pipeline(tmp_path / "base", size, experts=True)
    a, c = (synth.write_lora(tmp_path / f"{n}.safetensors", size, seed=n) for n in (1, 2))
    with pytest.raises(Refused, match="given twice"):
        plan(base, [f"{a},{c}", f"transformer={a}"], content=True)
    assert len(plan(base, [f"high={a}:1,low={a}:0.5"], content=True).matchings) == 2


def test_only_the_config_s_own_dtype_follows(tmp_path: Path) -> None:
    size = synth.tiny("wan2.2-t2v-a14b", blocks=1)
    base = synth.write_pipeline(tmp_path / "base", size)
    path = base / "transformer" / "config.json"
    config = {**json.loads(path.read_text()), "torch_dtype": "float32", "nested": {"dtype": "float32"}}
    path.write_text(json.dumps(config))
    lora = synth.write_lora(tmp_path / "lora.safetensors", size)
    merge(base, [str(lora)], tmp_path / "out", dtype="bfloat16")
    found = json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())
    assert found == {**config, "torch_dtype": "bfloat16"}


def test_shards_are_kept_when_a_side_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = synth.tiny("wan2.2-t2v-a14b", blocks=1)
    base = synth.write_pipeline(tmp_path / "base", size, shard_bytes=60_000)
    lora = synth.write_lora(tmp_path / "lora.safetensors", size)
    real = Path.open

    def failing(path: Path, *args: Any, **options: Any) -> Any:
        if path == base / "model_index.json" and options.get("buffering") == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", failing)
        with pytest.raises(ReadError, match=r"model_index\.json: cannot be read"):
            merge(base, [str(lora)], tmp_path / "out")
    report = merge(base, [str(lora)], tmp_path / "out")
    assert len(report.kept) == len(report.plan.files) > 1
