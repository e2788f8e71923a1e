"""diffusers and PEFT as a user runs them, on the CPU: load a LoRA, fuse it, look at the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
from diffusers.utils import logging
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.oracle.definition import Tensors

MODEL_CLASS: Any = diffusers.WanTransformer3DModel


@contextmanager
def quiet() -> Iterator[None]:
    """Diffusers and PEFT say at length what they drop; the tests say it themselves, with counts."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def open_model(folder: Path) -> Any:
    """The transformer in ``folder``, in float32."""
    with quiet():
        return MODEL_CLASS.from_pretrained(folder, torch_dtype=torch.float32)


def pipeline(pipeline_class: Any, **models: Any) -> Any:
    """A pipeline that has transformers and nothing else."""
    absent = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler", "transformer_2"))
    if pipeline_class is diffusers.WanImageToVideoPipeline:
        absent |= dict.fromkeys(("image_processor", "image_encoder"))
    return pipeline_class(**absent | models)


def in_float32(lora: Path, to: Path, renamed: Mapping[str, str] | None = None) -> Path:
    """The LoRA with every tensor in float32, so that diffusers folds alpha without rounding.

    Replaces the file's own dtypes and nothing else; ``renamed`` gives new names to the keys it has.
    """
    with safe_open(lora, "pt") as file:
        metadata = file.metadata()
    tensors = {(renamed or {}).get(key, key): tensor.float() for key, tensor in load_file(lora).items()}
    to.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, to, metadata=metadata)
    return to


def fused_by_pipeline(
    pipe: Any, loras: Sequence[tuple[Path, float]], *, component: str = "transformer"
) -> Tensors:
    """The weights of a pipeline's component with LoRA files at their strengths fused in."""
    names = [f"lora_{number}" for number in range(len(loras))]
    second = {"load_into_transformer_2": True} if component == "transformer_2" else {}
    with quiet():
        for name, (path, _) in zip(names, loras, strict=True):
            pipe.load_lora_weights(str(path), adapter_name=name, **second)
        pipe.set_adapters(names, [strength for _, strength in loras])
        pipe.fuse_lora(components=[component])
        pipe.unload_lora_weights()
    return dict(getattr(pipe, component).state_dict())


def fused_by_peft(model: Any, adapter: Path) -> Tensors:
    """The weights of a model with an adapter folder merged in by PEFT itself."""
    with quiet():
        return dict(peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())
