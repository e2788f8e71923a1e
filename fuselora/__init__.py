"""fuselora: fuse distilled LoRAs into diffusion-transformer checkpoints, offline.

``merge``, ``plan`` and ``read_marker`` are loaded when first used; importing the package costs
nothing and needs the standard library alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["__version__", "marker", "merge", "plan", "read_marker"]

if TYPE_CHECKING:
    from fuselora import marker
    from fuselora.marker import read_marker
    from fuselora.pipeline import merge, plan

_HOMES = {"merge": "fuselora.pipeline", "plan": "fuselora.pipeline", "read_marker": "fuselora.marker"}


def __getattr__(name: str) -> object:
    if name == "marker":
        return import_module("fuselora.marker")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fuselora' has no attribute {name!r}")
