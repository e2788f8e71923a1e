"""Write a synthetic Wan checkpoint and LoRAs for it: true names, dtypes and structure, seeded values.

The base goes to OUT/base, every LoRA to OUT/loras; with --experts each LoRA is written twice, as
STYLE.high and STYLE.low. Examples::

    # a tiny Wan2.2 pair in several shards, and a distilled pair with alpha 8
    python scripts/make_fixture.py --experts --shard-bytes 100000 --lora lightning --rank 4 --alpha 8 OUT

    # one ComfyUI file of a tiny image-to-video model, with a LightX2V-style extract
    python scripts/make_fixture.py --size wan2.2-i2v-a14b --layout file --lora extractor OUT

    # 3 GB of full-width blocks for a benchmark, rank 64 on every linear of a block
    python scripts/make_fixture.py --width full --blocks 4 --dtype BF16 --fill repeat \\
        --lora comfy --rank 64 OUT

    # a whole Wan2.2 at true size, all holes: enough for a plan
    python scripts/make_fixture.py --width full --experts --fill hole --lora comfy --rank 64 OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from fuselora.synth import (
    SHARD_BYTES,
    SIZES,
    STYLES,
    TORCH_DTYPES,
    Fill,
    WanSize,
    tiny,
    write_file,
    write_lora,
    write_native,
    write_pipeline,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what the command line asks for and print the paths."""
    options = _parser().parse_args(arguments)
    size = _size(options)
    print(_write_base(options, size))
    roles = ("high", "low") if options.experts else (None,)
    for style in options.lora:
        for number, role in enumerate(roles):
            stem = f"{style}.{role}" if role else style
            name = stem if STYLES[style].alpha == "config" else f"{stem}.safetensors"
            path = write_lora(
                options.out / "loras" / name, size, style=style, rank=options.rank, alpha=options.alpha,
                dtype=options.lora_dtype, diffs=options.diffs, seed=options.seed + number, fill=options.fill,
            )  # fmt: skip
            print(path)


def _size(options: argparse.Namespace) -> WanSize:
    if options.width == "tiny":
        return tiny(options.size, options.blocks or 2)
    size = SIZES[options.size]
    return size.with_blocks(options.blocks) if options.blocks else size


def _write_base(options: argparse.Namespace, size: WanSize) -> Path:
    out: Path = options.out / "base"
    common = {"dtype": options.dtype, "mixed": options.mixed, "fill": options.fill}
    if options.layout == "file":
        for number, name in enumerate(("model", "model_low")[: 1 + options.experts]):
            write_file(out / f"{name}.safetensors", size, seed=options.seed + number, **common)
        return out
    write = write_pipeline if options.layout == "pipeline" else write_native
    return write(
        out, size, experts=options.experts, seed=options.seed, shard_bytes=options.shard_bytes, **common
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT")
    add("--size", choices=SIZES, default="wan2.2-t2v-a14b", help="published model (default: %(default)s)")
    add("--width", choices=("tiny", "full"), default="tiny", help="tiny keeps structure and names only")
    add("--blocks", type=int, help="number of blocks (default: 2 when tiny, all when full)")
    add("--layout", choices=("pipeline", "native", "file"), default="pipeline")
    add("--experts", action="store_true", help="a high-noise and a low-noise model")
    add("--dtype", choices=TORCH_DTYPES, default="F32", help="of the base (default: %(default)s)")
    add("--mixed", action="store_true", help="keep in F32 what the model class keeps in float32")
    add("--shard-bytes", type=int, default=SHARD_BYTES)
    add("--lora", choices=STYLES, action="append", default=[], help="repeatable")
    add("--rank", type=int, default=4)
    add("--alpha", type=float, help="default: the rank")
    add("--lora-dtype", choices=TORCH_DTYPES, default="BF16")
    add("--diffs", action="store_true", help="add differences of norms and biases to the LoRAs")
    add("--seed", type=int, default=0)
    add("--fill", choices=get_args(Fill), default="noise", help="repeat: fast; hole: sparse, all zeros")
    return parser


if __name__ == "__main__":
    main()
