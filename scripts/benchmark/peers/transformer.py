"""The base as a model of diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers import WanTransformer3DModel

if TYPE_CHECKING:
    from benchmark.peers import Task

MODEL: Any = WanTransformer3DModel


def load(asked: Task) -> Any:  # noqa: ANN401 - diffusers has no types
    """In the base's own dtype."""
    return MODEL.from_pretrained(asked.base, torch_dtype=asked.dtype)
