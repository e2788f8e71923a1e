"""Where a module's alpha comes from, and what its rank is divided by."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

from fuselora.header import TensorInfo, encode_header, read_header
from fuselora.lora.config import AdapterConfig
from fuselora.lora.scale import Alpha, BadNumber, StoredAlpha, finite, read_number, resolve_alpha

# An alpha tensor


def alpha_in(folder: Path, dtype: str, raw: bytes, *shape: int) -> float:
    tensors = [TensorInfo("x", "F32", (1,), 0, 4), TensorInfo("q.alpha", dtype, shape, 4, 4 + len(raw))]
    path = folder / "x.safetensors"
    path.write_bytes(encode_header(tensors, {}) + bytes(4) + raw)
    header = read_header(path)
    with path.open("rb") as stream:
        return read_number(stream, header, header.by_name()["q.alpha"])


@pytest.mark.parametrize(
    ("dtype", "raw", "value"),
    [
        ("F64", struct.pack("<d", 0.1), 0.1),
        ("F32", struct.pack("<f", 8.5), 8.5),
        ("F16", struct.pack("<e", 0.25), 0.25),
        ("BF16", struct.pack("<f", -1.5)[2:], -1.5),
        ("I64", struct.pack("<q", 8), 8.0),
        ("I64", struct.pack("<q", -8), -8.0),
        ("U64", struct.pack("<Q", 1 << 60), float(1 << 60)),
        ("I32", struct.pack("<i", 16), 16.0),
        ("U32", struct.pack("<I", 16), 16.0),
        ("I16", struct.pack("<h", -3), -3.0),
        ("U16", struct.pack("<H", 64), 64.0),
        ("I8", struct.pack("<b", -1), -1.0),
        ("U8", b"\x08", 8.0),
        ("F32", struct.pack("<f", 0), 0.0),
        ("F8_E4M3", b"\x50", 8.0),
        ("F8_E4M3", b"\x81", -(2.0**-9)),
        ("F8_E5M2", b"\x48", 8.0),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_an_alpha_tensor_of_any_dtype(
    tmp_path: Path, dtype: str, raw: bytes, value: float, shape: tuple[int, ...]
) -> None:
    assert alpha_in(tmp_path, dtype, raw, *shape) == value


@pytest.mark.parametrize(
    ("dtype", "raw", "shape", "why"),
    [
        ("F32", struct.pack("<ff", 8, 8), (2,), r"not one number but has shape \[2\]"),
        ("F32", b"", (0,), r"not one number but has shape \[0\]"),
        ("F32", struct.pack("<f", math.nan), (), "nan, not a finite number"),
        ("F64", struct.pack("<d", -math.inf), (), "-inf, not a finite number"),
        ("BF16", b"\x80\x7f", (), "inf, not a finite number"),
        ("BOOL", b"\x01", (), "the dtype BOOL, which holds no number"),
        ("F8_E4M3", b"\x7f", (), "nan, not a finite number"),
        ("F8_E5M2", b"\x7c", (), "inf, not a finite number"),
        ("F8_E8M0", b"\x38", (), "the dtype F8_E8M0, which holds no number"),
    ],
)
def test_a_bad_alpha_tensor(tmp_path: Path, dtype: str, raw: bytes, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(BadNumber, match=why):
        alpha_in(tmp_path, dtype, raw, *shape)


@pytest.mark.parametrize(("value", "number"), [(8, 8.0), ("16.0", 16.0), ("-1e-2", -0.01), (0, 0.0)])
def test_finite(value: float | str, number: float) -> None:
    assert finite(value) == number


@pytest.mark.parametrize("value", ["", "abc", "8 ranks", "nan", "inf", "-Infinity", math.nan])
def test_not_finite(value: float | str) -> None:
    with pytest.raises(BadNumber, match="alpha"):
        finite(value)


# The order of sources


@dataclass
class Asked:
    """Metadata that counts how often it was looked at."""

    config: AdapterConfig | None
    times: int = 0

    def __call__(self) -> AdapterConfig | None:
        self.times += 1
        return self.config


def resolved(
    *, stored: bool = False, option: bool = False, config: bool = False, metadata: bool = False
) -> Alpha:
    return resolve_alpha(
        "q",
        16,
        stored=StoredAlpha(1.0) if stored else None,
        option=2.0 if option else None,
        config=AdapterConfig(3.0, use_rslora=True) if config else None,
        metadata=lambda: AdapterConfig(4.0) if metadata else None,
    )


def test_the_order_of_sources() -> None:
    assert resolved(stored=True, option=True, config=True, metadata=True) == Alpha(1.0, "tensor", 16, 16)
    assert resolved(option=True, config=True, metadata=True) == Alpha(2.0, "option", 16, 16)
    assert resolved(config=True, metadata=True) == Alpha(3.0, "adapter_config", 4.0, 16)
    assert resolved(metadata=True) == Alpha(4.0, "metadata", 16, 16)
    assert resolved() == Alpha(16, "rank", 16, 16)


def test_metadata_is_not_read_for_a_module_that_needs_none() -> None:
    metadata = Asked(AdapterConfig(4.0))
    resolve_alpha("q", 16, stored=StoredAlpha(1.0), option=None, config=None, metadata=metadata)
    resolve_alpha("q", 16, stored=None, option=1.0, config=None, metadata=metadata)
    resolve_alpha("q", 16, stored=None, option=None, config=AdapterConfig(1.0), metadata=metadata)
    assert metadata.times == 0


@pytest.mark.parametrize(("alpha", "ratio"), [(8.0, 0.5), (0.0, 0.0), (-8.0, -0.5), (16.0, 1.0)])
def test_the_ratio_is_alpha_by_rank(alpha: float, ratio: float) -> None:
    stored = StoredAlpha(alpha)
    found = resolve_alpha("q", 16, stored=stored, option=None, config=None, metadata=lambda: None)
    assert found.ratio == ratio


def test_rank_stabilised_configs_divide_by_the_root() -> None:
    config = AdapterConfig(8.0, use_rslora=True)
    found = resolve_alpha("q", 16, stored=None, option=None, config=config, metadata=lambda: None)
    assert found.ratio == 2.0
    found = resolve_alpha("q", 2, stored=None, option=None, config=None, metadata=lambda: config)
    assert found.ratio == pytest.approx(5.656854, abs=1e-6)


def test_a_tensor_or_an_option_is_divided_by_the_rank_whatever_the_config() -> None:
    config = AdapterConfig(8.0, use_rslora=True)
    for stored, option in ((StoredAlpha(8.0), None), (None, 8.0)):
        found = resolve_alpha("q", 16, stored=stored, option=option, config=config, metadata=lambda: config)
        assert found.ratio == 0.5


def test_nothing_divides_a_finished_factor() -> None:
    config = AdapterConfig(8.0, use_rslora=True)
    stored = StoredAlpha(0.5, finished=True)
    found = resolve_alpha("q", 16, stored=stored, option=4.0, config=config, metadata=lambda: config)
    assert found == Alpha(0.5, "alpha_scale", 1, 1)
    assert found.ratio == 0.5


def test_an_alpha_that_is_still_to_be_divided_by_the_root() -> None:
    stored = StoredAlpha(8.0, by_root=True)
    found = resolve_alpha("q", 16, stored=stored, option=None, config=None, metadata=lambda: None)
    assert found == Alpha(8.0, "rs_lora", 4.0, 16)


@pytest.mark.parametrize(("conv", "alpha"), [(False, 8.0), (True, 2.0)])
def test_convolutions_may_have_an_alpha_of_their_own(conv: bool, alpha: float) -> None:
    config = AdapterConfig(8.0, conv_alpha=2.0)
    found = resolve_alpha("q", 16, stored=None, option=None, config=None, metadata=lambda: config, conv=conv)
    assert found == Alpha(alpha, "metadata", 16, 16)
