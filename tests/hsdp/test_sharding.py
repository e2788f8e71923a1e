"""A fused folder under HSDP is a checkpoint like any other: what the ranks noted, held against its files.

FSDP2 takes bfloat16 and float32 parameters in one group as long as none is to be trained; it then
gathers their bytes. With gradients asked for, which is what torch and diffusers leave switched on, the
first forward refuses. ``--uniform`` is for engines that hold one dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from fuselora import read_marker
from tests.hsdp.cases import CASES, EXPERTS, FOLDERS, FUSED, MESHES, Case, Mesh
from tests.small import raw

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.hsdp.cases import Notes

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_mesh = pytest.mark.parametrize("mesh", MESHES, ids=[mesh.name for mesh in MESHES])


def noted(case: Case, ranks: Path) -> Iterator[tuple[int, Notes]]:
    """What each rank noted."""
    for rank in range(case.mesh.size):
        yield rank, case.notes(ranks, rank)


def stored(case: Case, ranks: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the expert's files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(case.component(ranks).glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_bytes(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert raw(tensor) == raw(theirs[name]), name


def case_of(mesh: Mesh, kind: str) -> Case:
    return Case(mesh, kind, EXPERTS[0])


@each_mesh
def test_fusing_after_sharding_is_the_fault(mesh: Mesh, ranks: Path) -> None:
    """A plain delta into a sharded weight: what fusing at run time did under HSDP (vLLM-Omni issue 6944)."""
    for _, notes in noted(case_of(mesh, "mixed"), ranks):
        error = notes.facts["add"]
        assert error.startswith("RuntimeError: aten.add_.Tensor got mixed torch.Tensor and DTensor")


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_folder_is_fused_throughout(kind: str, ranks: Path) -> None:
    marker = read_marker(ranks / FUSED / kind)
    assert marker is not None
    assert list(marker.components) == list(EXPERTS)
    for record in marker.components.values():
        assert record.fused == record.n_tensors > 50
    first, second = (stored(Case(MESHES[0], kind, expert), ranks) for expert in EXPERTS)
    assert not any(raw(tensor) == raw(second[name]) for name, tensor in first.items())


@each_case
def test_the_ranks_had_the_fused_folders_alone(case: Case, ranks: Path) -> None:
    expected = {
        path.relative_to(ranks).as_posix()
        for kind in FOLDERS
        for path in (ranks / FUSED / kind).rglob("*.safetensors")
    }
    for _, notes in noted(case, ranks):
        assert set(notes.facts["files"]) == expected
        assert {"fuselora", "peft"}.isdisjoint(notes.facts["imported"])


@each_case
def test_no_lora_exists(case: Case, ranks: Path) -> None:
    for _, notes in noted(case, ranks):
        facts = notes.facts
        names = [*facts["parameters"], *facts["buffers"], *facts["modules"], *facts["modules"].values()]
        assert len(names) > 100
        assert [name for name in names if "lora" in name.lower() or "adapter" in name.lower()] == []
        assert (facts["adapters"], facts["adapters loaded"]) == ([], False)


@each_case
def test_every_parameter_is_sharded(case: Case, ranks: Path) -> None:
    names = stored(case, ranks).keys()
    for _, notes in noted(case, ranks):
        parameters = notes.facts["parameters"]
        assert parameters.keys() == names
        for name, parameter in parameters.items():
            assert parameter["class"] == "DTensor", name
            assert parameter["placements"] == case.mesh.placements, name
        assert notes.facts["modules"][""] == "FSDPWanTransformer3DModel"
        assert notes.facts["modules"]["blocks.1"] == "FSDPWanTransformerBlock"


@each_case
def test_gathered_weights_are_the_files_bytes(case: Case, ranks: Path) -> None:
    for _, notes in noted(case, ranks):
        assert_same_bytes(notes.tensors("full"), stored(case, ranks))


@each_case
def test_each_rank_holds_its_rows_of_the_files(case: Case, ranks: Path) -> None:
    """Tensors of few rows leave ranks without any: all ranks together hold each row once a replica."""
    tensors = stored(case, ranks)
    for rank, notes in noted(case, ranks):
        rows = {name: tensor[case.mesh.rows(rank, len(tensor))] for name, tensor in tensors.items()}
        assert_same_bytes(notes.tensors("local"), rows)


@each_case
def test_a_forward_is_the_unsharded_one(case: Case, ranks: Path) -> None:
    """Bit for bit, on every rank, and as one process alone computes it."""
    alone = Case(MESHES[0], case.kind, case.expert).notes(ranks, 0).tensors("outputs")["plain"]
    assert torch.isfinite(alone).all()
    assert len(set(alone.flatten().tolist())) > 100
    for _, notes in noted(case, ranks):
        outputs = notes.tensors("outputs")
        assert raw(outputs["plain"]) == raw(alone)
        assert raw(outputs["sharded"]) == raw(alone)


# Two dtypes in one model


@each_mesh
def test_two_dtypes_are_sharded_as_stored_unless_trained(mesh: Mesh, ranks: Path) -> None:
    case = case_of(mesh, "mixed")
    assert {tensor.dtype for tensor in stored(case, ranks).values()} == {torch.bfloat16, torch.float32}
    for rank, notes in noted(case, ranks):
        assert not any(parameter["trainable"] for parameter in notes.facts["parameters"].values())
        trained = mesh.notes(ranks, rank).facts["trained"]
        assert trained.startswith("AssertionError: FSDP expects uniform original parameter dtype")


@each_mesh
def test_a_uniform_folder_may_be_trained(mesh: Mesh, ranks: Path) -> None:
    case = case_of(mesh, "uniform")
    assert {tensor.dtype for tensor in stored(case, ranks).values()} == {torch.bfloat16}
    for _, notes in noted(case, ranks):
        assert all(parameter["trainable"] for parameter in notes.facts["parameters"].values())


@each_mesh
def test_diffusers_itself_widens_a_uniform_folder(mesh: Mesh, ranks: Path) -> None:
    """Its class holds some tensors in float32 whatever is stored: here --uniform needs a cast afterwards."""
    for _, notes in noted(case_of(mesh, "uniform"), ranks):
        assert notes.facts["held"] == case_of(mesh, "mixed").notes(ranks, 0).facts["held"]
        assert set(notes.facts["held"].values()) == {"torch.bfloat16", "torch.float32"}


@each_mesh
def test_a_policy_of_one_dtype_computes_what_a_uniform_folder_does(mesh: Mesh, ranks: Path) -> None:
    """FSDP's ``param_dtype`` narrows the float32 tensors as it gathers them, and the output moves."""
    for rank, notes in noted(case_of(mesh, "uniform"), ranks):
        cast = mesh.notes(ranks, rank).tensors("outputs")["cast"]
        assert raw(cast) == raw(notes.tensors("outputs")["sharded"])
        mixed = case_of(mesh, "mixed").notes(ranks, rank).tensors("outputs")["sharded"]
        assert raw(cast) != raw(mixed)
