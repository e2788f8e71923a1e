"""Base checkpoints on disk: a component, a diffusers pipeline, Wan's own folders, one ComfyUI file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselora.synth.base import base_tensors
from fuselora.synth.configs import config, model_index, native_config, side_files
from fuselora.synth.files import FORMAT, write_json, write_safetensors
from fuselora.synth.values import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from fuselora.families.family import Layout
    from fuselora.synth.files import Fill
    from fuselora.synth.sizes import WanSize

SHARD_BYTES = 5_000_000_000  # Wan2.2's published float32 experts: 12 shards of up to 4.9 GB


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
        write_json(folder / "config.json", config)
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
        write_json(folder / index, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
    return folder


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
    write_skeleton(folder, size, experts=experts)
    for number, component in enumerate(_transformers(experts)):
        write_component(
            folder / component, specs, seed=seed + number,
            shard_bytes=shard_bytes, variant=variant, fill=fill,
        )  # fmt: skip
    return folder


def write_skeleton(folder: Path, size: WanSize, *, experts: bool = False) -> Path:
    """A diffusers pipeline whose transformers have a config each, and no weights."""
    for component in _transformers(experts):
        write_json(folder / component / "config.json", config(size))
    write_json(folder / "model_index.json", model_index(size, experts))
    for path, content in side_files(size).items():
        write_json(folder / path, content)
    for path, spec in _stand_ins(size):
        write_safetensors(folder / path, [spec], metadata=FORMAT)
    return folder


def _transformers(experts: bool) -> tuple[str, ...]:
    return ("transformer", "transformer_2") if experts else ("transformer",)


def _stand_ins(size: WanSize) -> Iterator[tuple[str, Spec]]:
    """One small tensor for each of the other models of a pipeline."""
    yield "text_encoder/model.safetensors", Spec("shared.weight", "BF16", (32, 16), std=0.02)
    weight = Spec("decoder.conv_in.weight", "F32", (8, 4, 3, 3, 3), std=0.02)
    yield "vae/diffusion_pytorch_model.safetensors", weight
    if size.image_dim:
        yield "image_encoder/model.safetensors", Spec("visual_projection.weight", "F32", (8, 4), std=0.02)


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
    write_json(folder / "configuration.json", {"framework": "Pytorch", "task": "text-to-video-synthesis"})
    write_json(folder / "google" / "umt5-xxl" / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})
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
