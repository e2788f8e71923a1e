"""The model class of diffusers that reads a synthetic checkpoint."""

from __future__ import annotations

from typing import Any

import diffusers

from fuselora.synth import SIZES, config


def model_class(name: str) -> Any:
    return getattr(diffusers, str(config(SIZES[name])["_class_name"]))
