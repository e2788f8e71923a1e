"""The scale of a pair: strength * alpha / rank, and where its alpha came from. Standard library only.

Order of sources: the file's own alpha tensor, or its finished factor (LongCat-Video's ``alpha_scale``),
``--alpha``, adapter_config.json, the file's metadata, and else the rank itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Literal

from fuselora.escape import short
from fuselora.header import Header, TensorInfo

if TYPE_CHECKING:
    from fuselora.lora.config import AdapterConfig

AlphaSource = Literal["tensor", "rs_lora", "alpha_scale", "option", "adapter_config", "metadata", "rank"]
SCALAR_FORMATS: Mapping[str, str] = {
    "F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "U64": "<Q", "I32": "<i", "U32": "<I",
    "I16": "<h", "U16": "<H", "I8": "<b", "U8": "<B",
}  # fmt: skip
# The formats whose upper half a shorter one is.
TRUNCATED: Mapping[str, str] = {"BF16": "<f", "F8_E5M2": "<e"}
MAX_DIMENSIONS = 8


class BadNumber(ValueError):
    """What gives a scale or a size, and is not one finite number; the text says why. ``name`` is whose."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class Alpha:
    """``value`` as stored; ``source`` says where it stood; ``divisor`` is rank, sqrt(rank) or 1.

    ``rank`` is that of the factors, or the one stated where they have none; 1 of a finished factor.
    """

    value: float
    source: AlphaSource
    divisor: float
    rank: int

    @property
    def ratio(self) -> float:
        return self.value / self.divisor


@dataclass(frozen=True, slots=True)
class StoredAlpha:
    """A number in the file: an alpha, or a ``finished`` factor; ``by_root``: sqrt(rank) is to divide it."""

    value: float
    finished: bool = False
    by_root: bool = False

    def over(self, rank: int) -> Alpha:
        if self.finished:
            return Alpha(self.value, "alpha_scale", 1, 1)
        if self.by_root:
            return Alpha(self.value, "rs_lora", math.sqrt(rank), rank)
        return Alpha(self.value, "tensor", rank, rank)


def read_number(stream: BinaryIO, header: Header, tensor: TensorInfo, name: str = "alpha") -> float:
    """The number in a tensor of any numeric dtype and of one element. Raises ``BadNumber``."""
    if tensor.n_elements != 1:
        raise BadNumber(f"{name} is not one number but has shape {list(tensor.shape)}", name)
    stream.seek(header.data_start + tensor.start)
    return finite(_scalar(stream.read(tensor.n_bytes), tensor.dtype, name), name)


def read_sizes(stream: BinaryIO, header: Header, tensor: TensorInfo, name: str) -> tuple[int, ...]:
    """The numbers in a tensor that holds a shape, of any numeric dtype. Raises ``BadNumber``."""
    if len(tensor.shape) != 1 or not 0 < tensor.n_elements <= MAX_DIMENSIONS:
        raise BadNumber(f"{name} is no list of sizes but has shape {list(tensor.shape)}", name)
    stream.seek(header.data_start + tensor.start)
    raw, width = stream.read(tensor.n_bytes), tensor.n_bytes // tensor.n_elements
    found = [_scalar(raw[at : at + width], tensor.dtype, name) for at in range(0, tensor.n_bytes, width)]
    return tuple(int(finite(size, name)) for size in found)


def finite(value: object, name: str = "alpha") -> float:
    """``value``, a number or the text of one, as a finite float. Raises ``BadNumber``."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BadNumber(f"{name} {short(value)} is not a number", name) from None
    except OverflowError:
        raise BadNumber(f"{name} is a number too large for a float", name) from None
    if not math.isfinite(number):
        raise BadNumber(f"{name} is {number}, not a finite number", name)
    return number


def resolve_alpha(
    module: str,
    rank: int,
    *,
    stored: StoredAlpha | None,
    option: float | None,
    config: AdapterConfig | None,
    metadata: Callable[[], AdapterConfig | None],
    conv: bool = False,
) -> Alpha:
    """The alpha of one module by the order of sources; ``conv``: of a convolution with a kernel.

    Raises ``BadNumber`` from ``metadata``.
    """
    if stored is not None:
        return stored.over(rank)
    if option is not None:
        return Alpha(option, "option", rank, rank)
    if config is not None:
        return Alpha(config.alpha_of(module, conv=conv), "adapter_config", config.divisor(rank), rank)
    if (found := metadata()) is not None:
        return Alpha(found.alpha_of(module, conv=conv), "metadata", found.divisor(rank), rank)
    return Alpha(rank, "rank", rank, rank)


def _scalar(raw: bytes, dtype: str, name: str) -> float:
    if dtype in TRUNCATED:
        code = TRUNCATED[dtype]
        return float(struct.unpack(code, raw.rjust(struct.calcsize(code), b"\0"))[0])
    if dtype == "F8_E4M3":
        return _float8_e4m3(raw[0])
    if dtype not in SCALAR_FORMATS:
        raise BadNumber(f"{name} has the dtype {dtype}, which holds no number", name)
    return float(struct.unpack(SCALAR_FORMATS[dtype], raw)[0])


def _float8_e4m3(byte: int) -> float:
    """Four bits of exponent, three of mantissa, no infinity (https://arxiv.org/abs/2209.05433, E4M3)."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))
