"""Every dtype of the format, in base and LoRA: bytes are kept, numbers are right, or it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselora.errors import Refused
from fuselora.faults import FACTOR_DTYPES
from fuselora.header import DTYPE_BITS, TensorInfo, encode_header, read_header
from fuselora.match import FUSABLE
from tests.small import noise, pair, tree, verified_merge

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Stored = tuple[str, tuple[int, ...], bytes]
PAIR = pair("a", noise(4, 1), noise(1, 4, seed=1))
OTHERS = sorted(DTYPE_BITS.keys() - FUSABLE)
NO_FACTORS = sorted(DTYPE_BITS.keys() - FACTOR_DTYPES)
SOME = bytes(range(1, 256))


def stored(dtype: str, *shape: int) -> Stored:
    """Bytes of no meaning."""
    n_bytes = torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8
    return dtype, shape, SOME[:n_bytes]


def plain(tensor: torch.Tensor) -> Stored:
    return "F32", tuple(tensor.shape), tensor.float().contiguous().numpy().tobytes()


def write(path: Path, tensors: Mapping[str, Stored]) -> Path:
    """Of any dtype, those that torch does not have too."""
    infos, at = [], 0
    for name, (dtype, shape, content) in tensors.items():
        infos.append(TensorInfo(name, dtype, shape, at, at := at + len(content)))
    header = encode_header(infos, {"format": "pt"})
    path.write_bytes(header + b"".join(content for _, _, content in tensors.values()))
    return path


def contents(path: Path) -> dict[str, Stored]:
    header, content = read_header(path), path.read_bytes()
    data = content[header.data_start :]
    return {t.name: (t.dtype, t.shape, data[t.start : t.end]) for t in header.tensors}


def merge(folder: Path, base: Mapping[str, Stored], one: Mapping[str, Stored], **options: Any) -> Path:
    inputs = write(folder / "base.safetensors", base), write(folder / "l.safetensors", one)
    verified_merge(inputs[0], inputs[1], folder / "out", **options)
    return folder / "out" / "base.safetensors"


def refused(folder: Path, base: Mapping[str, Stored], one: Mapping[str, Stored]) -> str:
    with pytest.raises(Refused) as caught:
        merge(folder, base, one)
    assert tree(folder).keys() == {"base.safetensors", "l.safetensors"}
    return caught.value.message


BASE = {"a.weight": plain(torch.ones(4, 4))}
LORA = {name: plain(tensor) for name, tensor in PAIR.items()}


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("dtype", OTHERS)
def test_what_holds_no_weights_is_copied(tmp_path: Path, dtype: str, options: dict[str, str]) -> None:
    """Under ``--dtype`` too, which is for weights."""
    base = {**BASE, "b": stored(dtype, 2, 4), "c": stored(dtype, 4), "d": stored(dtype, 0, 4)}
    found = contents(merge(tmp_path, base, LORA, **options))
    assert {name: found[name] for name in "bcd"} == {name: base[name] for name in "bcd"}
    assert found["a.weight"] != base["a.weight"]


@pytest.mark.parametrize("dtype", OTHERS)
def test_nothing_is_added_to_what_holds_no_weights(tmp_path: Path, dtype: str) -> None:
    base = {**BASE, "b.weight": stored(dtype, 4, 4)}
    said = refused(tmp_path, base, {**LORA, **{f"b{name[1:]}": part for name, part in LORA.items()}})
    assert f"b.weight is {dtype}: fusing into a" in said and "a.weight" not in said


@pytest.mark.parametrize(
    ("dtype", "what"), [("F64", "float64"), ("C64", "complex"), ("BOOL", "boolean"), ("I8", "quantised")]
)
def test_it_is_called_what_it_is(tmp_path: Path, dtype: str, what: str) -> None:
    base = {**BASE, "a.weight": stored(dtype, 4, 4), "b.weight": plain(torch.ones(4, 4))}
    assert f"fusing into a {what} base is not supported yet" in refused(tmp_path, base, LORA)


@pytest.mark.parametrize("part", ["lora_up.weight", "lora_down.weight", "diff", "diff_b", "set_weight"])
@pytest.mark.parametrize("dtype", NO_FACTORS)
def test_no_delta_is_made_of_what_holds_no_fractions(tmp_path: Path, dtype: str, part: str) -> None:
    shapes = {"lora_up.weight": (4, 2), "lora_down.weight": (2, 4), "diff_b": (4,)}
    base = {**BASE, "a.bias": plain(torch.ones(4))}
    one = {**LORA, f"a.{part}": stored(dtype, *shapes.get(part, (4, 4)))}
    said = refused(tmp_path, base, one)
    assert "l.safetensors" in said and f"a.{part}" in said and dtype in said


@pytest.mark.parametrize("dtype", NO_FACTORS)
def test_a_tensor_that_belongs_to_no_module_is_named(tmp_path: Path, dtype: str) -> None:
    assert "position_ids" in refused(tmp_path, BASE, {**LORA, "position_ids": stored(dtype, 4)})


WHOLE = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [*WHOLE, torch.uint64, *FLOATS, *EIGHT], ids=str)
def test_alpha_is_a_number_of_any_kind(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    alpha = torch.full(shape, 3.0).to(dtype)
    one = pair("a", torch.full((4, 2), 2.0), torch.ones(2, 4))
    save_file({"a.weight": torch.ones(4, 4)}, tmp_path / "base.safetensors")
    save_file({**one, "a.alpha": alpha}, tmp_path / "l.safetensors")
    verified_merge(tmp_path / "base.safetensors", tmp_path / "l.safetensors", tmp_path / "out")
    found = load_file(tmp_path / "out" / "base.safetensors")["a.weight"]
    assert found.eq(1 + 3 / 2 * 4).all()


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT], ids=str)
@pytest.mark.parametrize("base", FLOATS[:3], ids=str)
def test_factors_of_every_float_are_right(tmp_path: Path, base: torch.dtype, dtype: torch.dtype) -> None:
    one = pair("a", torch.full((4, 2), 1.5).to(dtype), torch.full((2, 4), -0.5).to(dtype))
    one |= {"b.diff": torch.full((4, 4), 0.25).to(dtype), "c.diff": torch.tensor(2.0).to(dtype)}
    names = ("a.weight", "b.weight", "c.weight")
    weights = [torch.ones(4, 4), torch.ones(4, 4), torch.tensor(1.0)]
    tensors = {name: tensor.to(base) for name, tensor in zip(names, weights, strict=True)}
    save_file(tensors, tmp_path / "base.safetensors")
    save_file(one, tmp_path / "l.safetensors")
    verified_merge(tmp_path / "base.safetensors", tmp_path / "l.safetensors", tmp_path / "out")
    found = load_file(tmp_path / "out" / "base.safetensors")
    assert [set(found[name].flatten().tolist()) for name in names] == [{-0.5}, {1.25}, {3.0}]
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (base, t.shape) for name, t in tensors.items()
    }
