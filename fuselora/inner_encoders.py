"""Text encoders that a single file holds beside its model: Stable Diffusion's, ComfyUI's. No torch.

Sources of the prefixes: diffusers' ``loaders/single_file_utils.py``, and for ``text_encoders.`` ComfyUI's
checkpoints of SD3 and FLUX. Most encoders have transformers' names there. OpenCLIP's have their own
(open_clip ``transformer.py``), with q, k and v in one tensor. Its ``text_projection`` is transposed, and no
trainer changes it: it is known by its own name alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuselora.families.runs import stacked
from fuselora.name_table import OWN, Home, NameTable, Place
from fuselora.text_encoders import COMFY_ENCODERS, TEXT_ENCODERS, Config

if TYPE_CHECKING:
    from fuselora.checkpoint import Component

Shapes = Mapping[str, tuple[int, ...]]

# prefix -> the pipeline's component: Stable Diffusion 1 and 2, SDXL, SDXL's refiner, and SDXL again
PREFIXES: Mapping[str, str] = {
    "cond_stage_model.transformer.": "text_encoder",
    "cond_stage_model.model.": "text_encoder",
    "conditioner.embedders.0.transformer.": "text_encoder",
    "conditioner.embedders.0.model.": "text_encoder_2",
    "conditioner.embedders.1.model.": "text_encoder_2",
}
COMFY_PREFIX = re.compile(r"text_encoders\.(?P<type>\w+)\.transformer\.")
TOKENS = (
    "text_model.embeddings.token_embedding.weight",
    "embeddings.token_embedding.weight",
    "token_embedding.weight",
)
RESBLOCK = re.compile(r"transformer\.resblocks\.(?P<n>[0-9]+)\.(?P<name>.+)")
RENAMED: Mapping[str, str] = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
IN_LAYER: Mapping[str, str] = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class InnerEncoder:
    """One of a file: what a pipeline calls it, its prefix, and what its config.json would say."""

    name: str
    prefix: str
    config: Config


def inner_encoders(shapes: Shapes) -> tuple[InnerEncoder, ...]:
    """Those whose prefix these tensors' names have; ComfyUI's in the order that pipelines number them.

    Of a file that holds two of one name neither is there: no key says which it means.
    """
    present = {prefix for name in shapes if (prefix := _prefix_of(name))}
    first = [
        InnerEncoder(name, prefix, _clip_config(prefix, shapes))
        for prefix, name in PREFIXES.items()
        if prefix in present
    ]
    types = [kind for kind in COMFY_ENCODERS if _comfy_prefix(kind) in present]
    numbered = zip(TEXT_ENCODERS, types, strict=False)
    rest = [InnerEncoder(name, _comfy_prefix(kind), _comfy_config(kind)) for name, kind in numbered]
    counts = Counter(one.name for one in (*first, *rest))
    return tuple(one for one in (*first, *rest) if counts[one.name] == 1)


def inner_table(component: Component, encoder: InnerEncoder) -> NameTable:
    """The encoder's tensors by transformers' names and by their own."""
    start = len(encoder.prefix)
    own = {
        name[start:]: Home((Place(name),), tensor.shape)
        for name, tensor in component.tensors().items()
        if name.startswith(encoder.prefix)
    }
    return NameTable({OWN: {**dict(_by_their_names(own)), **own}}, levels=True)


def _prefix_of(name: str) -> str | None:
    found = COMFY_PREFIX.match(name)
    return found[0] if found else next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)


def _comfy_prefix(kind: str) -> str:
    return f"text_encoders.{kind}.transformer."


def _comfy_config(kind: str) -> Config:
    meaning = COMFY_ENCODERS[kind]
    return {"model_type": meaning.model_types[0], "hidden_size": meaning.size}


def _clip_config(prefix: str, shapes: Shapes) -> Config:
    tables = (shapes[prefix + name] for name in TOKENS if prefix + name in shapes)
    width = next((shape[1] for shape in tables if len(shape) == 2), None)
    return {"model_type": "clip_text_model", "hidden_size": width}


def _by_their_names(own: Mapping[str, Home]) -> Iterator[tuple[str, Home]]:
    """Of OpenCLIP's tensors what transformers calls them; its q, k and v are thirds of the rows of one."""
    for name, home in own.items():
        if name in RENAMED:
            yield RENAMED[name], home
        elif found := RESBLOCK.fullmatch(name):
            layer = f"text_model.encoder.layers.{found['n']}"
            if found["name"].startswith("attn.in_proj_"):
                yield from _thirds(f"{layer}.self_attn", found["name"].removeprefix("attn.in_proj_"), home)
                continue
            stem, dot, leaf = found["name"].rpartition(".")
            if stem in IN_LAYER:
                yield f"{layer}.{IN_LAYER[stem]}{dot}{leaf}", home


def _thirds(layer: str, leaf: str, home: Home) -> Iterator[tuple[str, Home]]:
    if not home.shape or home.shape[0] % len(PROJECTIONS):
        return
    (place,), (rows, *columns) = home.places, home.shape
    sizes = [rows // len(PROJECTIONS)] * len(PROJECTIONS)
    for name, size, runs in zip(PROJECTIONS, sizes, stacked(sizes), strict=True):
        yield f"{layer}.{name}.{leaf}", Home((Place(place.base_key, runs),), (size, *columns))
