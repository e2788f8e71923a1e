"""Synthetic Wan checkpoints and LoRAs: true names, dtypes and structure, any width, seeded noise.

For the demo, the tests and the benchmark. Values are a function of the seed and of a tensor's native
name: the same checkpoint in both layouts holds the same numbers, and a LoRA of one rank and alpha the
same delta in every style. Files are written header first and then block by block, so that a
full-width checkpoint needs no more memory than a tiny one.

Shapes and names: the published checkpoints and diffusers' WanTransformer3DModel. LoRA styles: the
files that LightX2V, Kijai, diffusers, peft, musubi-tuner and DiffSynth-Studio publish or write.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from fuselora.families.wan import WAN
from fuselora.header import DTYPE_BITS, TensorInfo, encode_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from fuselora.families.family import Layout

Shape = tuple[int, ...]
# noise: fresh values throughout; repeat: the first block of a tensor again and again, for big files;
# hole: no data at all, a sparse file of zeros of the true size
Fill = Literal["noise", "repeat", "hole"]

SHARD_BYTES = 5_000_000_000  # Wan2.2's published float32 experts: 12 shards of up to 4.9 GB
BLOCK_ELEMENTS = 1 << 20
PATCH = (1, 2, 2)
VACE_CHANNELS = 96
TORCH_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor to write: ``mean`` plus ``std`` times noise seeded by ``key`` (its name if empty)."""

    name: str
    dtype: str
    shape: Shape
    std: float = 0.0
    mean: float = 0.0
    key: str = ""

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * DTYPE_BITS[self.dtype] // 8


# Sizes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WanSize:
    """The sizes that decide every shape of a Wan transformer. ``image_dim``: Wan2.1's image branch."""

    heads: int
    ffn: int
    blocks: int
    in_channels: int = 16
    out_channels: int = 16
    image_dim: int | None = None
    vace_blocks: int = 0
    head_dim: int = 128
    text_dim: int = 4096
    freq_dim: int = 256

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    def with_blocks(self, blocks: int) -> WanSize:
        return replace(self, blocks=blocks, vace_blocks=min(self.vace_blocks, blocks))


SIZES: Mapping[str, WanSize] = {
    "wan2.2-t2v-a14b": WanSize(heads=40, ffn=13824, blocks=40),
    "wan2.2-i2v-a14b": WanSize(heads=40, ffn=13824, blocks=40, in_channels=36),
    "wan2.2-ti2v-5b": WanSize(heads=24, ffn=14336, blocks=30, in_channels=48, out_channels=48),
    "wan2.1-t2v-14b": WanSize(heads=40, ffn=13824, blocks=40),
    "wan2.1-t2v-1.3b": WanSize(heads=12, ffn=8960, blocks=30),
    "wan2.1-i2v-14b": WanSize(heads=40, ffn=13824, blocks=40, in_channels=36, image_dim=1280),
    "wan2.1-vace-14b": WanSize(heads=40, ffn=13824, blocks=40, vace_blocks=8),
    "wan2.1-vace-1.3b": WanSize(heads=12, ffn=8960, blocks=30, vace_blocks=15),
}


def tiny(name: str, blocks: int = 2) -> WanSize:
    """``SIZES[name]`` with small widths: channels and structure stay, and different widths stay different."""
    full = SIZES[name]
    return replace(
        full.with_blocks(blocks),
        heads=full.heads // 10,
        head_dim=12,  # rotary embeddings split it in three even parts
        ffn=full.ffn // 128,
        image_dim=full.image_dim and full.image_dim // 64,
        text_dim=32,
        freq_dim=16,
    )


def config(size: WanSize) -> dict[str, object]:
    """``config.json`` of diffusers' WanTransformer3DModel or WanVACETransformer3DModel."""
    found: dict[str, object] = {
        "_class_name": "WanTransformer3DModel",
        "_diffusers_version": "0.35.0",
        "added_kv_proj_dim": size.dim if size.image_dim else None,
        "attention_head_dim": size.head_dim,
        "cross_attn_norm": True,
        "eps": 1e-6,
        "ffn_dim": size.ffn,
        "freq_dim": size.freq_dim,
        "image_dim": size.image_dim,
        "in_channels": size.in_channels,
        "num_attention_heads": size.heads,
        "num_layers": size.blocks,
        "out_channels": size.out_channels,
        "patch_size": list(PATCH),
        "pos_embed_seq_len": None,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": size.text_dim,
    }
    if size.vace_blocks:
        vace = {"_class_name": "WanVACETransformer3DModel", "vace_in_channels": VACE_CHANNELS}
        found |= vace | {"vace_layers": _vace_layers(size)}
    return found


def native_config(size: WanSize) -> dict[str, object]:
    """``config.json`` as Wan's own repositories hold it."""
    found: dict[str, object] = {
        "_class_name": "VaceWanModel" if size.vace_blocks else "WanModel",
        "_diffusers_version": "0.33.0",
        "dim": size.dim,
        "eps": 1e-6,
        "ffn_dim": size.ffn,
        "freq_dim": size.freq_dim,
        "in_dim": size.in_channels,
        "model_type": _model_type(size),
        "num_heads": size.heads,
        "num_layers": size.blocks,
        "out_dim": size.out_channels,
        "text_len": 512,
    }
    if size.vace_blocks:
        found |= {"vace_in_dim": VACE_CHANNELS, "vace_layers": _vace_layers(size)}
    return found


def _vace_layers(size: WanSize) -> list[int]:
    return [number * (size.blocks // size.vace_blocks) for number in range(size.vace_blocks)]


def _model_type(size: WanSize) -> str:
    if size.vace_blocks:
        return "vace"
    return {36: "i2v", 48: "ti2v"}.get(size.in_channels, "t2v")


# Checkpoints ---------------------------------------------------------------------------------------


def base_tensors(
    size: WanSize, layout: Layout = "native", *, dtype: str = "F32", mixed: bool = False, prefix: str = ""
) -> tuple[Spec, ...]:
    """Every tensor of one transformer, in the order of diffusers' state dict.

    ``mixed``: what the model class keeps in float32 stays F32 beside another ``dtype``.
    """
    specs = []
    for name, shape in _native_shapes(size):
        std, mean = _moments(name, shape)
        stored = "F32" if mixed and WAN.keeps_float32(name, "native") else dtype
        specs.append(Spec(prefix + _in_layout(name, layout), stored, shape, std, mean, key=name))
    return tuple(specs)


def _in_layout(native: str, layout: Layout) -> str:
    # norm2 and norm3 are names in both layouts, so a native name must not be translated "to native".
    return native if layout == "native" else WAN.translate(native, layout)


def _native_shapes(size: WanSize) -> Iterator[tuple[str, Shape]]:
    dim = size.dim
    yield "head.modulation", (1, 2, dim)
    yield from _weight_and_bias("patch_embedding", (dim, size.in_channels, *PATCH))
    if size.vace_blocks:
        yield from _weight_and_bias("vace_patch_embedding", (dim, VACE_CHANNELS, *PATCH))
    yield from _weight_and_bias("time_embedding.0", (dim, size.freq_dim))
    yield from _weight_and_bias("time_embedding.2", (dim, dim))
    yield from _weight_and_bias("time_projection.1", (6 * dim, dim))
    yield from _weight_and_bias("text_embedding.0", (dim, size.text_dim))
    yield from _weight_and_bias("text_embedding.2", (dim, dim))
    if size.image_dim:
        yield from _image_embedding(dim, size.image_dim)
    for number in range(size.blocks):
        yield from _block(f"blocks.{number}", size)
    for number in range(size.vace_blocks):
        yield from _vace_block(f"vace_blocks.{number}", size, first=number == 0)
    yield from _weight_and_bias("head.head", (size.out_channels * math.prod(PATCH), dim))


def _image_embedding(dim: int, image_dim: int) -> Iterator[tuple[str, Shape]]:
    yield from _weight_and_bias("img_emb.proj.0", (image_dim,))
    yield from _weight_and_bias("img_emb.proj.1", (image_dim, image_dim))
    yield from _weight_and_bias("img_emb.proj.3", (dim, image_dim))
    yield from _weight_and_bias("img_emb.proj.4", (dim,))


def _block(block: str, size: WanSize) -> Iterator[tuple[str, Shape]]:
    yield f"{block}.modulation", (1, 6, size.dim)
    yield from _attention(f"{block}.self_attn", size.dim, image=False)
    yield from _attention(f"{block}.cross_attn", size.dim, image=bool(size.image_dim))
    yield from _weight_and_bias(f"{block}.norm3", (size.dim,))
    yield from _weight_and_bias(f"{block}.ffn.0", (size.ffn, size.dim))
    yield from _weight_and_bias(f"{block}.ffn.2", (size.dim, size.ffn))


def _vace_block(block: str, size: WanSize, *, first: bool) -> Iterator[tuple[str, Shape]]:
    modulation, *rest = _block(block, size)
    yield modulation
    if first:
        yield from _weight_and_bias(f"{block}.before_proj", (size.dim, size.dim))
    yield from rest
    yield from _weight_and_bias(f"{block}.after_proj", (size.dim, size.dim))


def _attention(name: str, dim: int, *, image: bool) -> Iterator[tuple[str, Shape]]:
    for linear in "qkvo":
        yield from _weight_and_bias(f"{name}.{linear}", (dim, dim))
    yield f"{name}.norm_q.weight", (dim,)
    yield f"{name}.norm_k.weight", (dim,)
    if image:
        yield from _weight_and_bias(f"{name}.k_img", (dim, dim))
        yield from _weight_and_bias(f"{name}.v_img", (dim, dim))
        yield f"{name}.norm_k_img.weight", (dim,)


def _weight_and_bias(module: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def _moments(name: str, shape: Shape) -> tuple[float, float]:
    """(std, mean): weights keep the size of what they multiply, norms lie near one."""
    if name.endswith(".bias"):
        return 0.02, 0.0
    if name.endswith("modulation"):
        return shape[-1] ** -0.5, 0.0
    if len(shape) == 1:
        return 0.1, 1.0
    return math.prod(shape[1:]) ** -0.5, 0.0


# LoRAs ---------------------------------------------------------------------------------------------

ATTENTION = r"(vace_)?blocks\.\d+\.(self|cross)_attn\."
BLOCKS = r"(vace_)?blocks\."
EVERYWHERE = r""
# LightX2V's extractor decomposes weights of a million elements and more; only the head has fewer at 14B
ALL_BUT_HEAD = r"(?!head\.)"
NORMS_AND_BIASES = frozenset({"norm", "bias"})
EVERYTHING = frozenset({"norm", "bias", "modulation", "linear", "conv"})


@dataclass(frozen=True, slots=True)
class LoraStyle:
    """How one tool writes a LoRA.

    ``targets``: a regular expression of native names whose 2-D weights become pairs; ``diffs``: the
    kinds of all other tensors that are stored as full differences. ``alpha``: a tensor when one is
    given, a tensor always, or a number in the header or in ``adapter_config.json``;
    ``alpha_dtype``: the tensor's dtype, the factors' if None. ``capped``: a rank is at most a
    weight's shorter side, as a singular value decomposition gives. ``metadata``: with places for
    ``rank`` and ``alpha``.
    """

    layout: Layout
    prefix: str
    down: str = "lora_A"
    up: str = "lora_B"
    targets: str = BLOCKS
    diffs: frozenset[str] = frozenset()
    alpha: Literal["given", "always", "header", "config"] = "given"
    alpha_dtype: str | None = None
    flat: bool = False
    capped: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


COMFY = LoraStyle("native", "diffusion_model.", "lora_down", "lora_up")
FORMAT = {"format": "pt"}
KOHYA = {
    "ss_network_module": "networks.lora_wan",
    "ss_network_dim": "{rank}",
    "ss_network_alpha": "{alpha:.1f}",
}
STYLES: Mapping[str, LoraStyle] = {
    "comfy": COMFY,
    "lightning": replace(COMFY, alpha="always", alpha_dtype="I64"),
    "comfy-extractor": replace(COMFY, targets=EVERYWHERE, diffs=NORMS_AND_BIASES, capped=True),
    "extractor": replace(COMFY, targets=ALL_BUT_HEAD, diffs=EVERYTHING, capped=True),
    "trainer": LoraStyle("native", "diffusion_model.", metadata=FORMAT),
    "default": LoraStyle("native", "", "lora_A.default", "lora_B.default"),
    "kohya": LoraStyle(
        "native", "lora_unet_", "lora_down", "lora_up", flat=True, alpha="always", metadata=KOHYA
    ),
    "peft": LoraStyle("diffusers", ""),
    "diffusers": LoraStyle("diffusers", "transformer.", targets=ATTENTION, alpha="header", metadata=FORMAT),
    "adapter": LoraStyle("diffusers", "base_model.model.", alpha="config", metadata=FORMAT),
}


def lora_tensors(
    size: WanSize,
    *,
    style: str = "comfy",
    rank: int = 4,
    alpha: float | None = None,
    dtype: str = "BF16",
    diffs: bool = False,
    prefix: str | None = None,
) -> tuple[Spec, ...]:
    """Every tensor of a LoRA for ``size`` in one of ``STYLES``; its deltas are a tenth of the weights.

    ``alpha`` None means the rank, stored or not as the style does. ``diffs`` adds differences of norms
    and biases to a style without them; ``prefix`` replaces the style's.
    """
    how = STYLES[style]
    how = replace(how, diffs=how.diffs | NORMS_AND_BIASES) if diffs else how
    how = how if prefix is None else replace(how, prefix=prefix)
    specs = (_lora_specs(base, how, rank, alpha, dtype) for base in base_tensors(size))
    return tuple(spec for group in specs for spec in group)


def _lora_specs(base: Spec, how: LoraStyle, rank: int, alpha: float | None, dtype: str) -> Iterator[Spec]:
    """The tensors that speak of one base tensor: a pair, a difference, or nothing."""
    kind = _kind(base)
    if kind == "linear" and re.match(how.targets, base.name):
        yield from _pair(base, how, min(rank, *base.shape) if how.capped else rank, alpha, dtype)
    elif kind in how.diffs:
        module = base.name.rpartition(".")[0]
        part = {"bias": "diff_b", "modulation": "diff_m"}.get(kind, "diff")
        name = f"{_spelled(module, how)}.{part}"
        yield Spec(name, dtype, base.shape, base.std / 10, key=f"{module}.{part}")


def _pair(base: Spec, how: LoraStyle, rank: int, alpha: float | None, dtype: str) -> Iterator[Spec]:
    out_dim, in_dim = base.shape
    module = base.name.removesuffix(".weight")
    name = _spelled(module, how)
    scale = 1.0 if alpha is None else alpha / rank
    up_std = 0.1 / (abs(scale or 1.0) * rank**0.5)
    yield Spec(f"{name}.{how.down}.weight", dtype, (rank, in_dim), base.std, key=f"{module}.down")
    yield Spec(f"{name}.{how.up}.weight", dtype, (out_dim, rank), up_std, key=f"{module}.up")
    if how.alpha == "always" or (how.alpha == "given" and alpha is not None):
        stored = float(rank if alpha is None else alpha)
        yield Spec(f"{name}.alpha", how.alpha_dtype or dtype, (), mean=stored)


def _kind(base: Spec) -> str:
    """What a native tensor is: ``bias``, ``modulation``, ``norm``, ``linear`` or ``conv``."""
    leaf = base.name.rpartition(".")[2]
    if leaf in ("bias", "modulation"):
        return leaf
    return {1: "norm", 2: "linear"}.get(len(base.shape), "conv")


def _spelled(module: str, how: LoraStyle) -> str:
    name = _in_layout(module, how.layout)
    return how.prefix + (name.replace(".", "_") if how.flat else name)


def _lora_metadata(size: WanSize, how: LoraStyle, rank: int, alpha: float) -> dict[str, str]:
    found = {key: text.format(rank=rank, alpha=float(alpha)) for key, text in how.metadata.items()}
    if how.alpha == "header":
        entries = {how.prefix + key: value for key, value in _peft_config(size, how, rank, alpha).items()}
        found["lora_adapter_metadata"] = json.dumps(entries, indent=2, sort_keys=True)
    return found


def _peft_config(size: WanSize, how: LoraStyle, rank: int, alpha: float) -> dict[str, object]:
    linears = [base.name for base in base_tensors(size.with_blocks(1)) if _kind(base) == "linear"]
    targets = {
        _in_layout(name.removesuffix(".weight"), how.layout).split(".", 2)[2]
        for name in linears
        if re.match(how.targets, name)
    }
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_bias": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


# Writing -------------------------------------------------------------------------------------------


def write_safetensors(
    path: Path,
    specs: Iterable[Spec],
    *,
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
    fill: Fill = "noise",
) -> Path:
    """One file, its tensors in the order of the safetensors library: wide dtypes first, then by name."""
    ordered = sorted(specs, key=lambda spec: (-DTYPE_BITS[spec.dtype], spec.name))
    start = _header(ordered, metadata or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(start)
        if fill == "hole":
            stream.truncate(len(start) + sum(spec.n_bytes for spec in ordered))
            return path
        for spec in ordered:
            stream.writelines(value_blocks(spec, seed, repeat=fill == "repeat"))
    return path


def value_blocks(spec: Spec, seed: int, *, repeat: bool = False) -> Iterator[memoryview]:
    """The bytes of one tensor in blocks of at most 2^20 elements, made as they are asked for."""
    import torch

    digest = hashlib.sha256(f"{seed}/{spec.key or spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    item = DTYPE_BITS[spec.dtype] // 8
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[spec.dtype])
    block = memoryview(b"")
    for at in range(0, spec.n_elements, BLOCK_ELEMENTS):
        n = min(BLOCK_ELEMENTS, spec.n_elements - at)
        if not (repeat and at):
            noise = torch.randn(n, generator=generator).mul_(spec.std).add_(spec.mean)
            block = noise.to(dtype).view(torch.uint8).numpy().data
        yield block[: n * item]


def write_component(
    folder: Path,
    specs: Sequence[Spec],
    *,
    config: Mapping[str, object] | None = None,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    variant: str | None = None,
    fill: Fill = "noise",
) -> Path:
    """A component's folder as diffusers saves it: config, and one file or shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        _write_json(folder / "config.json", config)
    shards = _shards(specs, shard_bytes)
    stem = "diffusion_pytorch_model" + (f".{variant}" if variant else "")
    names = [f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [f"{stem}.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, seed=seed, metadata=FORMAT, fill=fill)
    if len(shards) > 1:
        weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        total = {"total_size": sum(spec.n_bytes for spec in specs)}
        index = "diffusion_pytorch_model.safetensors.index" + (f".{variant}" if variant else "") + ".json"
        _write_json(folder / index, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
    return folder


def write_pipeline(
    folder: Path,
    size: WanSize,
    *,
    experts: bool = False,
    dtype: str = "F32",
    mixed: bool = False,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    variant: str | None = None,
    fill: Fill = "noise",
) -> Path:
    """A diffusers pipeline: its transformers are real, every other component a small stand-in.

    ``experts``: transformer (high noise) from ``seed`` and transformer_2 (low noise) from ``seed + 1``.
    """
    specs = base_tensors(size, "diffusers", dtype=dtype, mixed=mixed)
    for number, component in enumerate(("transformer", "transformer_2")[: 1 + experts]):
        write_component(
            folder / component, specs, config=config(size), seed=seed + number,
            shard_bytes=shard_bytes, variant=variant, fill=fill,
        )  # fmt: skip
    _write_json(folder / "model_index.json", _model_index(size, experts))
    for path, content in _pipeline_side_files(size).items():
        _write_json(folder / path, content)
    stand_in = Spec("shared.weight", "BF16", (32, 16), std=0.02)
    write_safetensors(folder / "text_encoder" / "model.safetensors", [stand_in], metadata=FORMAT)
    stand_in = Spec("decoder.conv_in.weight", "F32", (8, 4, 3, 3, 3), std=0.02)
    write_safetensors(folder / "vae" / "diffusion_pytorch_model.safetensors", [stand_in], metadata=FORMAT)
    return folder


def write_native(
    folder: Path,
    size: WanSize,
    *,
    experts: bool = False,
    dtype: str = "F32",
    mixed: bool = False,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    fill: Fill = "noise",
) -> Path:
    """A checkpoint as Wan's own repositories hold it, with stand-ins for its other files.

    ``experts``: ``high_noise_model`` from ``seed`` and ``low_noise_model`` from ``seed + 1``; without,
    the one model lies in ``folder`` itself.
    """
    specs = base_tensors(size, dtype=dtype, mixed=mixed)
    parts = (folder / "high_noise_model", folder / "low_noise_model") if experts else (folder,)
    for number, part in enumerate(parts):
        write_component(
            part, specs, config=native_config(size), seed=seed + number, shard_bytes=shard_bytes, fill=fill
        )
    _write_json(folder / "configuration.json", {"framework": "Pytorch", "task": "text-to-video-synthesis"})
    _write_json(folder / "google" / "umt5-xxl" / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})
    (folder / "Wan2.1_VAE.pth").write_bytes(b"a stand-in, not a pickle\n")
    return folder


def write_file(
    path: Path,
    size: WanSize,
    *,
    layout: Layout = "native",
    prefix: str = "model.diffusion_model.",
    dtype: str = "BF16",
    mixed: bool = False,
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
    fill: Fill = "noise",
) -> Path:
    """One transformer in one file, as ComfyUI reads it."""
    specs = base_tensors(size, layout, dtype=dtype, mixed=mixed, prefix=prefix)
    return write_safetensors(path, specs, seed=seed, metadata=metadata, fill=fill)


def write_lora(
    path: Path,
    size: WanSize,
    *,
    style: str = "comfy",
    rank: int = 4,
    alpha: float | None = None,
    dtype: str = "BF16",
    diffs: bool = False,
    prefix: str | None = None,
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
    fill: Fill = "noise",
) -> Path:
    """A LoRA file; in style ``adapter`` a folder of ``adapter_model.safetensors`` and its config.

    ``metadata`` is added to the style's own; the rest as in ``lora_tensors``.
    """
    how = STYLES[style] if prefix is None else replace(STYLES[style], prefix=prefix)
    said = float(rank) if alpha is None else alpha
    specs = lora_tensors(size, style=style, rank=rank, alpha=alpha, dtype=dtype, diffs=diffs, prefix=prefix)
    header = _lora_metadata(size, how, rank, said) | dict(metadata or {})
    if how.alpha != "config":
        return write_safetensors(path, specs, seed=seed, metadata=header, fill=fill)
    path.mkdir(parents=True, exist_ok=True)
    write_safetensors(path / "adapter_model.safetensors", specs, seed=seed, metadata=header, fill=fill)
    _write_json(path / "adapter_config.json", _peft_config(size, how, rank, said))
    return path


def _header(ordered: Sequence[Spec], metadata: Mapping[str, str]) -> bytes:
    """The header padded to 8 bytes, as the safetensors library does, so that data starts anywhere."""
    infos, at = [], 0
    for spec in ordered:
        infos.append(TensorInfo(spec.name, spec.dtype, spec.shape, at, at + spec.n_bytes))
        at += spec.n_bytes
    text = encode_header(infos, metadata)[8:].rstrip(b" ")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shards(specs: Sequence[Spec], shard_bytes: int) -> list[list[Spec]]:
    """Filled in order; a tensor larger than ``shard_bytes`` has a shard of its own."""
    shards: list[list[Spec]] = [[]]
    n_bytes = 0
    for spec in specs:
        if shards[-1] and n_bytes + spec.n_bytes > shard_bytes:
            shards.append([])
            n_bytes = 0
        shards[-1].append(spec)
        n_bytes += spec.n_bytes
    return shards


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model_index(size: WanSize, experts: bool) -> dict[str, object]:
    kind = _model_type(size)
    classes = {"i2v": "WanImageToVideoPipeline", "vace": "WanVACEPipeline"}
    boundary = 0.9 if kind == "i2v" else 0.875
    transformer = ["diffusers", config(size)["_class_name"]]
    found: dict[str, object] = {
        "_class_name": classes.get(kind, "WanPipeline"),
        "_diffusers_version": "0.35.0",
        "boundary_ratio": boundary if experts else None,
        "expand_timesteps": kind == "ti2v",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": transformer,
        "transformer_2": transformer if experts else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if size.image_dim:
        found["image_encoder"] = ["transformers", "CLIPVisionModel"]
        found["image_processor"] = ["transformers", "CLIPImageProcessor"]
    return found


def _pipeline_side_files(size: WanSize) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {
        "scheduler/scheduler_config.json": {
            "_class_name": "UniPCMultistepScheduler",
            "flow_shift": 3.0,
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
        },
        "text_encoder/config.json": {"architectures": ["UMT5EncoderModel"], "model_type": "umt5"},
        "tokenizer/tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"},
        "vae/config.json": {"_class_name": "AutoencoderKLWan", "z_dim": size.out_channels},
    }
    if size.image_dim:
        found["image_encoder/config.json"] = {"architectures": ["CLIPVisionModel"]}
        found["image_processor/preprocessor_config.json"] = {"image_processor_type": "CLIPImageProcessor"}
    return found
