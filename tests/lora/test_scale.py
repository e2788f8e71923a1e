"""Where a module's alpha comes from, and what its rank is divided by."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
from peft.utils.other import get_pattern_key

from fuselora.header import TensorInfo, encode_header, read_header
from fuselora.lora.scale import (
    METADATA_KEYS,
    AdapterConfig,
    Alpha,
    BadAlpha,
    config_of,
    config_of_metadata,
    finite,
    peft_configs,
    read_alpha,
    resolve_alpha,
)

# An alpha tensor


def alpha_in(folder: Path, dtype: str, raw: bytes, *shape: int) -> float:
    tensors = [TensorInfo("x", "F32", (1,), 0, 4), TensorInfo("q.alpha", dtype, shape, 4, 4 + len(raw))]
    path = folder / "x.safetensors"
    path.write_bytes(encode_header(tensors, {}) + bytes(4) + raw)
    header = read_header(path)
    with path.open("rb") as stream:
        return read_alpha(stream, header, header.by_name()["q.alpha"])


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
        ("F8_E4M3", b"\x38", (), "the dtype F8_E4M3, which holds no number"),
    ],
)
def test_a_bad_alpha_tensor(tmp_path: Path, dtype: str, raw: bytes, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(BadAlpha, match=why):
        alpha_in(tmp_path, dtype, raw, *shape)


@pytest.mark.parametrize(("value", "number"), [(8, 8.0), ("16.0", 16.0), ("-1e-2", -0.01), (0, 0.0)])
def test_finite(value: float | str, number: float) -> None:
    assert finite(value) == number


@pytest.mark.parametrize("value", ["", "abc", "8 ranks", "nan", "inf", "-Infinity", math.nan])
def test_not_finite(value: float | str) -> None:
    with pytest.raises(BadAlpha, match="alpha"):
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
        stored=1.0 if stored else None,
        option=2.0 if option else None,
        config=AdapterConfig(3.0, use_rslora=True) if config else None,
        metadata=lambda: AdapterConfig(4.0) if metadata else None,
    )


def test_the_order_of_sources() -> None:
    assert resolved(stored=True, option=True, config=True, metadata=True) == Alpha(1.0, "tensor", 16)
    assert resolved(option=True, config=True, metadata=True) == Alpha(2.0, "option", 16)
    assert resolved(config=True, metadata=True) == Alpha(3.0, "adapter_config", 4.0)
    assert resolved(metadata=True) == Alpha(4.0, "metadata", 16)
    assert resolved() == Alpha(16, "rank", 16)


def test_metadata_is_not_read_for_a_module_that_needs_none() -> None:
    metadata = Asked(AdapterConfig(4.0))
    resolve_alpha("q", 16, stored=1.0, option=None, config=None, metadata=metadata)
    resolve_alpha("q", 16, stored=None, option=1.0, config=None, metadata=metadata)
    resolve_alpha("q", 16, stored=None, option=None, config=AdapterConfig(1.0), metadata=metadata)
    assert metadata.times == 0


@pytest.mark.parametrize(("alpha", "ratio"), [(8.0, 0.5), (0.0, 0.0), (-8.0, -0.5), (16.0, 1.0)])
def test_the_ratio_is_alpha_by_rank(alpha: float, ratio: float) -> None:
    found = resolve_alpha("q", 16, stored=alpha, option=None, config=None, metadata=lambda: None)
    assert found.ratio == ratio


def test_rank_stabilised_configs_divide_by_the_root() -> None:
    config = AdapterConfig(8.0, use_rslora=True)
    found = resolve_alpha("q", 16, stored=None, option=None, config=config, metadata=lambda: None)
    assert found.ratio == 2.0
    found = resolve_alpha("q", 2, stored=None, option=None, config=None, metadata=lambda: config)
    assert found.ratio == pytest.approx(5.656854, abs=1e-6)


def test_a_tensor_or_an_option_is_divided_by_the_rank_whatever_the_config() -> None:
    config = AdapterConfig(8.0, use_rslora=True)
    for stored, option in ((8.0, None), (None, 8.0)):
        found = resolve_alpha("q", 16, stored=stored, option=option, config=config, metadata=lambda: config)
        assert found.ratio == 0.5


# adapter_config.json


def test_a_config_without_alpha_gives_no_rule() -> None:
    assert config_of({}) is None
    assert config_of({"r": 8, "lora_alpha": None}) is None


def test_a_config() -> None:
    document = {"lora_alpha": 16, "r": 8, "use_rslora": True, "alpha_pattern": {"l3": "128"}}
    assert config_of(document) == AdapterConfig(16.0, True, {"l3": 128.0})
    assert config_of({"lora_alpha": 16, "use_rslora": None, "alpha_pattern": None}) == AdapterConfig(16.0)


@pytest.mark.parametrize(
    "document",
    [
        {"lora_alpha": "sixteen"},
        {"lora_alpha": [16]},
        {"lora_alpha": math.inf},
        {"lora_alpha": 16, "alpha_pattern": {"q": "much"}},
        {"lora_alpha": 16, "alpha_pattern": {"q": None}},
        {"lora_alpha": 16, "alpha_pattern": {"q[": 8}},
    ],
)
def test_a_bad_config(document: dict[str, object]) -> None:
    with pytest.raises(BadAlpha):
        config_of(document)


MODULES = ["l3", "l7", "model.l3", "model.xl3", "layers.3.q", "layers.30.q", "layers.3.q.extra", "q"]
PATTERNS = ["l3", "q", "layers.3.q", r".*layers\.3\..*", r"layers\.\d+\.q", "model.l3", "l3|l7", "x"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_to_peft(module: str, pattern: str) -> None:
    peft_takes_it = get_pattern_key([pattern], module) == pattern
    assert (AdapterConfig(1.0, alpha_pattern={pattern: 2.0}).alpha_of(module) == 2.0) == peft_takes_it


def test_the_first_pattern_that_fits_counts() -> None:
    config = AdapterConfig(1.0, alpha_pattern={"l3": 2.0, "model.l3": 3.0, ".*": 4.0})
    assert [config.alpha_of(module) for module in ("model.l3", "l3", "q")] == [2.0, 2.0, 4.0]


# The file's metadata


@pytest.mark.parametrize("key", METADATA_KEYS)
@pytest.mark.parametrize(("text", "alpha"), [("8", 8.0), ("16.0", 16.0), ("0", 0.0), ("-4", -4.0)])
def test_a_plain_key(key: str, text: str, alpha: float) -> None:
    assert config_of_metadata({key: text, "format": "pt"}) == AdapterConfig(alpha)


def test_plain_keys_in_their_order() -> None:
    metadata = {key: str(number) for number, key in enumerate(METADATA_KEYS)}
    for number, key in enumerate(METADATA_KEYS):
        assert config_of_metadata(metadata) == AdapterConfig(float(number))
        del metadata[key]
    assert config_of_metadata(metadata) is None


def test_none_as_kohya_writes_it_is_no_alpha() -> None:
    assert config_of_metadata({"ss_network_alpha": "None"}) is None
    assert config_of_metadata({"alpha": "None", "ss_network_alpha": "16.0"}) == AdapterConfig(16.0)


@pytest.mark.parametrize("text", ["abc", "nan", "inf", "", "none"])
def test_a_bad_plain_key(text: str) -> None:
    with pytest.raises(BadAlpha):
        config_of_metadata({"alpha": text})


@pytest.mark.parametrize("prefix", ["", "transformer.", "transformer_2.", "unet."])
def test_diffusers_flattens_the_config_under_a_component(prefix: str) -> None:
    document = {
        prefix + "lora_alpha": 32,
        prefix + "r": 16,
        prefix + "use_rslora": True,
        prefix + "alpha_pattern": {"q": 64},
    }
    metadata = {"lora_adapter_metadata": json.dumps(document), "alpha": "8"}
    assert config_of_metadata(metadata) == AdapterConfig(32.0, True, {"q": 64.0})


def test_each_expert_may_have_a_config_of_its_own() -> None:
    document = {"transformer.lora_alpha": 8, "transformer_2.lora_alpha": 16, "transformer_2.use_rslora": True}
    metadata = {"lora_adapter_metadata": json.dumps(document)}
    assert set(peft_configs(metadata)) == {"transformer", "transformer_2"}
    assert config_of_metadata(metadata, "transformer") == AdapterConfig(8.0)
    assert config_of_metadata(metadata, "transformer_2") == AdapterConfig(16.0, use_rslora=True)
    assert config_of_metadata(metadata, "unet") == AdapterConfig(8.0)


def test_a_config_for_another_component_without_alpha_leaves_the_plain_keys() -> None:
    metadata = {"lora_adapter_metadata": json.dumps({"text_encoder.lora_alpha": 4}), "alpha": "8"}
    assert config_of_metadata(metadata) == AdapterConfig(8.0)


@pytest.mark.parametrize("text", ["{", "", "[]", "3", "null", "[" * 100_000])
def test_a_config_in_the_header_that_is_no_object(text: str) -> None:
    with pytest.raises(BadAlpha, match="lora_adapter_metadata is not a JSON object"):
        config_of_metadata({"lora_adapter_metadata": text})


def test_no_metadata_gives_no_rule() -> None:
    assert config_of_metadata({}) is None
    assert config_of_metadata({"format": "pt"}) is None
