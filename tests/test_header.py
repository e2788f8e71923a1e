"""The header reader against every lie a file can tell, and against the safetensors library both ways."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from fuselora.errors import FormatError, InputError
from fuselora.header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    PAGE,
    Header,
    TensorInfo,
    bytes_by_dtype,
    dtype_name,
    encode_header,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# a property test may reuse one folder: every example writes its file anew
ONE_FOLDER = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
STORED = [dtype for dtype, bits in DTYPE_BITS.items() if bits >= 8 and dtype not in ("F8_E8M0", "C64")]


def raw(path: Path, text: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def written(path: Path, document: object, data: bytes = b"\0\0\0\0") -> Path:
    return raw(path, json.dumps(document).encode(), data)


def broken(path: Path, what: str, tensor: str | None = None) -> FormatError:
    """Reading ``path`` fails, says ``what``, and names the file and the tensor."""
    with pytest.raises(FormatError, match=re.escape(what)) as caught:
        read_header(path)
    error = caught.value
    assert error.message.startswith(f"{path}: ")
    assert error.facts["path"] == str(path)
    assert error.facts.get("tensor") == tensor
    assert tensor is None or repr(tensor) in error.message
    return error


def library_refuses(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return False
    except SafetensorError:
        return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# lengths


@pytest.mark.parametrize("n_bytes", [1, 7])
def test_a_file_shorter_than_its_length_field(path: Path, n_bytes: int) -> None:
    path.write_bytes(b"\x10" + bytes(n_bytes - 1))
    broken(path, f"is {n_bytes} bytes long, too short")


def test_a_length_field_and_nothing_else(path: Path) -> None:
    broken(raw(path, b"", length=64), "is cut short: its header needs 72 bytes and the file has 8")


def test_a_header_that_ends_after_the_file(path: Path) -> None:
    broken(raw(path, b"{}", length=3), "is cut short: its header needs 11 bytes and the file has 10")


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 62, (1 << 64) - 1])
def test_a_header_longer_than_any_reader_takes(path: Path, length: int) -> None:
    broken(raw(path, b"{}", length=length), f"claims a header of {length} bytes, over the cap")


def test_a_header_at_the_cap_is_not_refused_for_its_length(path: Path) -> None:
    broken(raw(path, b"{}", length=MAX_HEADER_BYTES), "is cut short")


def test_a_header_of_no_bytes(path: Path) -> None:
    broken(raw(path, b"", b"data"), "has a header that is not a JSON object")


def test_a_length_that_ends_within_the_json(path: Path) -> None:
    text = json.dumps({"a": entry()}).encode()
    broken(raw(path, text, bytes(4), length=len(text) - 1), "has a broken header")


def test_a_length_that_reaches_into_the_data(path: Path) -> None:
    text = json.dumps({"a": entry()}).encode()
    broken(raw(path, text, b"\x01\x02\x03\x04", length=len(text) + 2), "has a broken header")


@pytest.mark.parametrize(("data", "what"), [(3, "is cut short"), (0, "is cut short"), (5, "is over-long")])
def test_data_of_the_wrong_length(path: Path, data: int, what: str) -> None:
    written(path, {"a": entry()}, bytes(data))
    header_bytes = path.stat().st_size - data
    declares = f"declares {header_bytes + 4} bytes and the file has {header_bytes + data}"
    broken(path, f"{what}: its header {declares}")


def test_data_after_a_header_without_tensors(path: Path) -> None:
    broken(raw(path, b"{}", b"x"), "is over-long")


# text


@pytest.mark.parametrize("text", [b"[]", b'"a"', b"1", b"null", b" {}", b"\xef\xbb\xbf{}"])
def test_a_header_that_is_no_object(path: Path, text: bytes) -> None:
    broken(raw(path, text), "has a header that is not a JSON object")


@pytest.mark.parametrize("text", [b"{", b"{}}", b"{} x", b"{}\0\0", b"{'a': 1}", b'{"a": 1,}', b'{"a\n": 1}'])
def test_a_header_that_is_no_json(path: Path, text: bytes) -> None:
    broken(raw(path, text), "has a broken header")


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_constants_that_json_does_not_have(path: Path, constant: bytes) -> None:
    text = b'{"a": {"dtype": "U8", "shape": [' + constant + b'], "data_offsets": [0, 4]}}'
    broken(raw(path, text, bytes(4)), f"{constant.decode()} is not JSON")


@pytest.mark.parametrize("start", [b'{"a":', b'{"__metadata__":[', b"{" + b'"a":['])
def test_nesting_without_end(path: Path, start: bytes) -> None:
    broken(raw(path, start + b"[" * 200_000), "has a broken header")
    broken(raw(path, b'{"a":' * 200_000), "has a broken header")


def test_a_number_of_a_million_digits(path: Path) -> None:
    text = b'{"a": {"dtype": "U8", "shape": [' + b"9" * 1_000_000 + b'], "data_offsets": [0, 4]}}'
    with pytest.raises(FormatError, match=r"broken header|impossible shape"):
        read_header(raw(path, text, bytes(4)))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32-le"])
def test_other_encodings_of_json(path: Path, encoding: str) -> None:
    broken(raw(path, json.dumps({"a": entry()}).encode(encoding), bytes(4)), "has a broken header")


def test_bytes_that_are_no_utf8(path: Path) -> None:
    text = json.dumps({"a?": entry()}).encode()
    for wrong in (b"\xff", b"\xed\xa0\x80", b"\xc0\x80"):
        broken(raw(path, text.replace(b"?", wrong), bytes(4)), "has a broken header")


@pytest.mark.parametrize(
    "document",
    [{"a\ud800": entry()}, {"__metadata__": {"\udc00": "x"}}, {"__metadata__": {"x": "\ud83d"}}],
)
def test_half_of_a_surrogate_pair(path: Path, document: object) -> None:
    broken(written(path, document), "half of a surrogate pair")
    assert library_refuses(path)


def test_a_whole_surrogate_pair_is_a_letter(path: Path) -> None:
    written(path, {"a\U0001f600": entry(), "__metadata__": {"\U0001f600": "\U0001f600"}})
    assert b"\\ud83d\\ude00" in path.read_bytes()
    header = read_header(path)
    assert [tensor.name for tensor in header.tensors] == ["a\U0001f600"]
    assert header.metadata == {"\U0001f600": "\U0001f600"}


# names and metadata


def test_a_name_twice(path: Path) -> None:
    once = b'"blocks.0.weight": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
    broken(raw(path, b"{" + once + b", " + once + b"}", bytes(4)), "'blocks.0.weight' appears twice")


def test_metadata_twice(path: Path) -> None:
    broken(raw(path, b'{"__metadata__": {}, "__metadata__": {}}'), "'__metadata__' appears twice")


def test_a_field_of_a_tensor_twice(path: Path) -> None:
    text = b'{"a": {"dtype": "F32", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'
    broken(raw(path, text, bytes(4)), "'dtype' appears twice")


@pytest.mark.parametrize(
    "metadata", [[], "pt", 1, None, {"format": 1}, {"format": None}, {"a": ["b"]}, {"a": {"b": "c"}}]
)
def test_metadata_that_is_no_map_of_strings(path: Path, metadata: object) -> None:
    broken(written(path, {"__metadata__": metadata, "a": entry()}), "__metadata__ that is not a map")


# one tensor's claims


@pytest.mark.parametrize(
    "claim",
    [
        None,
        [],
        "U8",
        {},
        {"dtype": "U8", "shape": [4]},
        {"dtype": "U8", "data_offsets": [0, 4]},
        {"shape": [4], "data_offsets": [0, 4]},
        {**entry(), "strides": [1]},
    ],
)
def test_a_malformed_entry(path: Path, claim: object) -> None:
    broken(written(path, {"a.weight": claim}), "malformed entry", "a.weight")


@pytest.mark.parametrize("dtype", ["", "u8", "F128", "torch.float32", "I4", 8, None, ["U8"], True])
def test_an_unknown_dtype(path: Path, dtype: object) -> None:
    broken(written(path, {"a": entry(dtype=dtype)}), "unknown dtype", "a")


@pytest.mark.parametrize(
    "shape", [None, 4, "4", {}, [-4], [4.0], [True, 4], ["4"], [None], [[4]], [1 << 64], [4, 1 << 63]]
)
def test_an_impossible_shape(path: Path, shape: object) -> None:
    broken(written(path, {"a": entry(shape=shape)}), "impossible shape", "a")


@pytest.mark.parametrize("offsets", [[], [0], [0, 4, 4], [4, 0], [0, 4.0], ["0", "4"], [-4, 0], [False, 4]])
def test_an_impossible_range(path: Path, offsets: object) -> None:
    broken(written(path, {"a": entry(offsets=offsets)}), "impossible range", "a")


@pytest.mark.parametrize("offsets", [None, 4, {}, "04", [0, 1 << 63]])
def test_a_range_of_another_kind(path: Path, offsets: object) -> None:
    broken(written(path, {"a": entry(offsets=offsets)}), "impossible range", "a")


@pytest.mark.parametrize(
    ("dtype", "shape", "needs"),
    [("U8", [3], "3"), ("U8", [5], "5"), ("F32", [4], "16"), ("U8", [], "1"), ("U8", [4, 0], "0"),
     ("F4", [7], "3.5"), ("F6_E2M3", [5], "3.75"), ("F64", [1], "8")],
)  # fmt: skip
def test_a_range_that_does_not_fit_the_shape(path: Path, dtype: str, shape: list[int], needs: str) -> None:
    broken(written(path, {"a": entry(dtype, shape)}), f"spans 4 bytes; {dtype} {shape} needs {needs}", "a")


@pytest.mark.parametrize("shape", [[1 << 62, 8], [1 << 62, 8, 0], [1 << 32, 1 << 32], [1 << 62] * 300_000])
def test_a_shape_that_overflows(path: Path, shape: list[int]) -> None:
    broken(written(path, {"a": entry(shape=shape)}), "overflows", "a")
    assert library_refuses(path)


def test_a_shape_of_nothing_does_not_overflow(path: Path) -> None:
    written(path, {"a": entry(shape=[0, 1 << 62, 8], offsets=(0, 0))}, b"")
    assert read_header(path).tensors[0].n_elements == 0
    assert not library_refuses(path)


# the tensors together


def test_two_tensors_that_overlap(path: Path) -> None:
    document = {"a": entry(), "b": entry(offsets=(2, 6))}
    broken(written(path, document, bytes(6)), "overlaps the one before it", "b")


def test_two_tensors_at_one_place(path: Path) -> None:
    broken(written(path, {"a": entry(), "b": entry()}), "overlaps the one before it", "b")


def test_a_hole_between_tensors(path: Path) -> None:
    document = {"a": entry(), "b": entry(offsets=(5, 9))}
    broken(written(path, document, bytes(9)), "leaves a hole before it", "b")


def test_a_hole_at_the_start(path: Path) -> None:
    broken(written(path, {"a": entry(offsets=(1, 5))}, bytes(5)), "leaves a hole before it", "a")


def test_a_tensor_far_behind_the_end(path: Path) -> None:
    document = {"a": entry(offsets=((1 << 62), (1 << 62) + 4))}
    broken(written(path, document), "leaves a hole before it", "a")


# what is not safetensors at all

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 27435684\n"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (LFS, "a Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "an HTML or XML page"),
        (b"\n  <html>Sign in</html>", "an HTML or XML page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an HTML or XML page"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01u.", "a pickle"),
        (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94", "a pickle"),
        (b"GGUF\x03\x00\x00\x00" + bytes(40), "a GGUF file"),
    ],
)
def test_lookalikes_are_named(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    assert broken(path, f"is not safetensors: it looks like {what}").hint


def test_an_empty_file(path: Path) -> None:
    path.touch()
    broken(path, "is empty")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_checkpoint(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "lora.pt"
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=zipped)
    what = "a zip archive, perhaps a torch checkpoint" if zipped else "a pickle"
    assert "safetensors" in (broken(path, what).hint or "")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_other_content_under_a_torch_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lora{suffix}"
    path.write_bytes(b"who knows what this is")
    assert broken(path, f"not safetensors but a {suffix} file").hint


def test_noise(path: Path) -> None:
    for content in (bytes(range(1, 200)), b"root:x:0:0:root:/root:/bin/bash\n"):
        path.write_bytes(content)
        broken(path, "is not safetensors: it begins with no header")


@pytest.mark.parametrize(
    "length", [0x3C, 0x280, 0x480, int.from_bytes(b"PK\x03\x04", "little") & 0xFFFF, 0x46554747 & 0xFFFF]
)
def test_a_length_that_begins_like_something_else(path: Path, length: int) -> None:
    text = json.dumps({"a": entry()}, separators=(",", ":")).encode().ljust(length)
    assert read_header(raw(path, text, bytes(4))).tensors[0].name == "a"


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(InputError, match="cannot be read") as caught:
            read_header(path)
        assert caught.value.facts["path"] == str(path)


# agreement with the safetensors library

TORCH: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
SHAPES: Sequence[tuple[int, ...]] = ((), (1,), (7,), (3, 5), (2, 0, 4), (1, 2, 3, 2))


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def test_its_files_are_read_here(path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{dtype}.{number}": torch.randint(0, 100, shape, generator=generator).to(TORCH[dtype])
        for dtype in TORCH
        for number, shape in enumerate(SHAPES)
    }
    save_file(tensors, path, {"format": "pt", "ключ": 'a "quoted" \\ value\n'})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "ключ": 'a "quoted" \\ value\n'}
    assert header.n_bytes == path.stat().st_size
    content = path.read_bytes()[header.data_start :]
    assert header.by_name().keys() == tensors.keys()
    for info in header.tensors:
        tensor = tensors[info.name]
        assert TORCH[info.dtype] == tensor.dtype
        assert info.shape == tuple(tensor.shape)
        assert content[info.start : info.end] == bits_of(tensor)


def test_a_file_without_metadata(path: Path) -> None:
    save_file({"a": torch.zeros(3)}, path)
    assert read_header(path).metadata == {}


def laid_out(items: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorInfo, ...]:
    infos, at = [], 0
    for name, dtype, shape in items:
        end = at + TensorInfo("", dtype, shape, 0, 0).n_elements * DTYPE_BITS[dtype] // 8
        infos.append(TensorInfo(name, dtype, shape, at, end))
        at = end
    return tuple(infos)


def write_encoded(
    path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str], to: int = 0
) -> bytes:
    encoded = encode_header(tensors, metadata, congruent_to=to)
    path.write_bytes(encoded + bytes(tensors[-1].end if tensors else 0))
    return encoded


def assert_library_reads(path: Path, header: Header) -> None:
    with safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == header.metadata
        assert set(file.keys()) == set(header.by_name())
        for info in header.tensors:
            found: Any = file.get_slice(info.name)
            assert (found.get_dtype(), tuple(found.get_shape())) == (info.dtype, info.shape)


@pytest.mark.parametrize("to", [0, 1, 8, 16, 2048, 4088, 4095])
def test_our_headers_load_there_padding_and_metadata_included(path: Path, to: int) -> None:
    tensors = laid_out(
        [("f.weight", "F32", (3, 2)), ("b", "BF16", (5,)), ("s", "I64", ()), ("n", "F16", (0,))]
    )
    tensors = laid_out([(t.name, t.dtype, t.shape) for t in sorted(tensors, key=lambda t: -t.n_bytes)])
    encoded = write_encoded(path, tensors, {"format": "pt", "n\u00e4me": "\u4e2d"}, to)
    assert len(encoded) % PAGE == to
    assert len(encoded) < 2 * PAGE
    header = read_header(path)
    assert (header.tensors, header.data_start) == (tensors, len(encoded))
    assert_library_reads(path, header)


def test_values_survive_there(path: Path) -> None:
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tensors = laid_out([("a", "F32", (2, 3))])
    path.write_bytes(encode_header(tensors, {"format": "pt"}, congruent_to=24) + bits_of(values))
    assert torch.equal(load_file(path)["a"], values)


def test_a_header_of_nothing(path: Path) -> None:
    write_encoded(path, (), {})
    header = read_header(path)
    assert (header.tensors, header.metadata, header.n_bytes) == ((), {}, PAGE)


def test_the_digest_covers_everything_before_the_data(path: Path) -> None:
    tensors = laid_out([("a", "F32", (2,))])
    write_encoded(path, tensors, {"format": "pt"})
    plain = read_header(path).sha256
    for metadata, to in (({"format": "np"}, 0), ({"format": "pt"}, 8)):
        write_encoded(path, tensors, metadata, to)
        assert read_header(path).sha256 != plain


names = st.text(max_size=12).filter(lambda name: name != "__metadata__")
items = st.lists(
    st.tuples(names, st.sampled_from(STORED), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
    max_size=6,
    unique_by=lambda item: item[0],
)


@ONE_FOLDER
@given(items, st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4), st.integers(0, PAGE - 1))
def test_what_is_encoded_is_read_back(
    tmp_path: Path, items: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str], to: int
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = laid_out(items)
    encoded = write_encoded(path, tensors, metadata, to)
    header = read_header(path)
    assert len(encoded) % PAGE == to
    assert (header.tensors, header.metadata, header.data_start) == (tensors, metadata, len(encoded))
    assert_library_reads(path, header)


@ONE_FOLDER
@given(st.data())
def test_one_changed_byte_never_crashes(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    tensors = laid_out([("a.weight", "F32", (3, 2)), ("b", "BF16", (5,)), ("c", "U8", (2,))])
    text = encode_header(tensors, {"format": "pt"})[8:].rstrip(b" ")
    content = bytearray(struct.pack("<Q", len(text)) + text + bytes(tensors[-1].end))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        header = read_header(path)
    except FormatError as error:
        assert str(path) in error.message
        return
    assert not library_refuses(path)
    assert sum(tensor.n_bytes for tensor in header.tensors) == len(content) - header.data_start


def test_a_hundred_thousand_tensors(path: Path) -> None:
    tensors = laid_out([(f"blocks.{number}.weight", "BF16", (1, 2)) for number in range(100_000)])
    write_encoded(path, tensors, {"format": "pt"})
    header = read_header(path)
    assert header.tensors == tensors
    assert len(header.by_name()) == 100_000


@pytest.mark.parametrize(
    ("code", "name"),
    [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32"), ("F8_E4M3", "F8_E4M3"), ("none", "none")],
)
def test_dtypes_as_torch_calls_them(code: str, name: str) -> None:
    assert dtype_name(code) == name


def test_bytes_by_dtype_the_most_first() -> None:
    sizes = [("F32", 3), ("BF16", 4), ("F16", 6), ("F32", 3)]
    assert list(bytes_by_dtype(sizes).items()) == [("F32", 6), ("F16", 6), ("BF16", 4)]
    assert bytes_by_dtype([]) == {}
