"""Tensors of no elements and of no dimensions: carried along, or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselora.errors import Refused
from tests.small import noise, pair, tree, verified_merge

if TYPE_CHECKING:
    from pathlib import Path

Tensors = dict[str, torch.Tensor]
EMPTY = [(0,), (0, 4), (4, 0), (0, 0), (3, 0, 2), (0, 1 << 40)]
PAIR = pair("a", noise(4, 1), noise(1, 4, seed=1))


def merge(folder: Path, base: Tensors, one: Tensors, **options: Any) -> Tensors:
    save_file({"a.weight": torch.ones(4, 4), **base}, folder / "base.safetensors")
    save_file({**PAIR, **one}, folder / "l.safetensors")
    verified_merge(folder / "base.safetensors", folder / "l.safetensors", folder / "out", **options)
    return load_file(folder / "out" / "base.safetensors")


def refused(folder: Path, base: Tensors, one: Tensors, *says: str) -> None:
    with pytest.raises(Refused) as caught:
        merge(folder, base, one)
    assert tree(folder).keys() == {"base.safetensors", "l.safetensors"}
    for word in says:
        assert word in caught.value.message


@pytest.mark.parametrize("dtype", ["keep", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_an_empty_tensor_of_the_base_comes_along(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    found = merge(tmp_path, {"b": torch.zeros(shape)}, {}, dtype=dtype)
    assert found["b"].shape == shape
    assert (
        found["b"].dtype
        == found["a.weight"].dtype
        == (torch.float32 if dtype == "keep" else getattr(torch, dtype))
    )


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("kind", ["pair", "diff"])
def test_nothing_is_added_to_an_empty_tensor(tmp_path: Path, kind: str, shape: tuple[int, int]) -> None:
    out, into = shape
    one = {"b.diff": torch.zeros(shape)} if kind == "diff" else {
        "b.lora_up.weight": torch.zeros(out, 2), "b.lora_down.weight": torch.zeros(2, into)
    }  # fmt: skip
    refused(tmp_path, {"b.weight": torch.zeros(shape)}, one, "l.safetensors", "b.", "is empty")


def test_a_pair_of_rank_0(tmp_path: Path) -> None:
    one = {"b.lora_up.weight": torch.zeros(4, 0), "b.lora_down.weight": torch.zeros(0, 4)}
    says = ("b.lora_up.weight is empty, its shape is [4, 0]", "b.lora_down.weight is empty")
    refused(tmp_path, {"b.weight": torch.ones(4, 4)}, one, *says)


@pytest.mark.parametrize("dtype", ["keep", "float16"])
def test_a_scalar_of_the_base_comes_along(tmp_path: Path, dtype: str) -> None:
    found = merge(tmp_path, {"b": torch.tensor(3.5)}, {}, dtype=dtype)["b"]
    assert (found.shape, found.item()) == ((), 3.5)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_scalar_takes_a_scalar(tmp_path: Path, kernel: str) -> None:
    found = merge(tmp_path, {"b.weight": torch.tensor(2.0)}, {"b.diff": torch.tensor(0.5)}, kernel=kernel)
    assert (found["b.weight"].shape, found["b.weight"].item()) == ((), 2.5)


@pytest.mark.parametrize(
    ("base", "diff"), [((), (1,)), ((1,), ()), ((4,), (4, 1)), ((4,), (1, 4)), ((4, 1), (4,)), ((4, 4), ())]
)
def test_no_shape_is_made_to_fit(tmp_path: Path, base: tuple[int, ...], diff: tuple[int, ...]) -> None:
    refused(tmp_path, {"b.weight": torch.ones(base)}, {"b.diff": torch.ones(diff)}, "b", str(list(diff)))


@pytest.mark.parametrize("base", [(), (1,), (4,)], ids=str)
def test_a_pair_is_for_a_matrix(tmp_path: Path, base: tuple[int, ...]) -> None:
    rows = base[0] if base else 1
    one = pair("b", torch.ones(rows, 1), torch.ones(1, 1))
    refused(tmp_path, {"b.weight": torch.ones(base)}, one, f"but b.weight is {list(base)}")
