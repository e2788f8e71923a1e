"""Published few-step LoRAs, and the name of one among others. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FewStep:
    """Published few-step LoRAs, known by their name, and how those who made them sample.

    ``pattern`` is searched for in a file's, folder's or repository's name, case aside. ``source`` says
    where the values are published; one that is not, or not as one number, is None. ``remark`` is what
    none of the fields can say, ``phase`` the part of a pipeline that alone it is for, ``alpha`` that of files
    that say none themselves.
    """

    name: str
    pattern: str
    source: str
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    flow_shift: float | None = None
    solver: str | None = None
    remark: str | None = None
    phase: str | None = None
    alpha: float | None = None


# Words that releases and their repacks put around a name; single letters are those of t2v, i2v, 14b, v1.1.
RELEASE_WORDS = frozenset((
    *"abeimnprtv", "wan", "ti", "high", "low", "noise", "lora", "loras", "rank", "bf", "fp", "fn", "scaled",
    "model", "models", "step", "steps", "cfg", "distill", "distilled", "adaptive", "resized", "dyno",
    "diffusers", "safetensors", "comfy", "comfyui", "lightx", "lightning", "kijai", "hf", "extracted",
    "quantile", "avg", "fro", "new", "moe", "seko", "fastvideo", "fastwan", "fullattn", "turbo", "quanhaol",
    "flux", "alpha", "alimama", "creative", "bytedance", "hyper", "sd", "sdxl", "xl", "qwen", "image", "edit",
    "fal", "dev", "org", "ltx", "ltxv", "lightricks", "minimax", "h", "fl", "sensenova", "u",
    "mot",
    "latent", "consistency", "diffsynth", "studio", "alibaba", "pai",
    "unet", "dmd", "tianweiy", "y", "byteszn", "adapter", "pytorch", "weights",
))  # fmt: skip


def few_step_named(rows: Iterable[FewStep], name: str) -> FewStep | None:
    """The published few-step LoRA that a file, folder or repository of this name is.

    None if the name has words of its own beside: such a LoRA was made for a published one, or with it.
    """
    for row in rows:
        found = re.search(row.pattern, name, re.IGNORECASE)
        if found:
            beside = re.findall("[a-z]+", f"{name[: found.start()]} {name[found.end() :]}".lower())
            return row if RELEASE_WORDS.issuperset(beside) else None
    return None
