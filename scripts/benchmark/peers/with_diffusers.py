"""diffusers: load the transformer, ``fuse_lora``, ``save_pretrained``."""

from __future__ import annotations

from benchmark.peers import OUT_DTYPE, PREFIX, WEIGHTS, task
from benchmark.peers.transformer import load


def main() -> None:
    """Fuse all LoRAs at once."""
    asked = task()
    model = load(asked)
    for name, path, _ in asked.adapters():
        model.load_lora_adapter(str(path), weight_name=WEIGHTS, prefix=PREFIX, adapter_name=name)
    names, _, strengths = zip(*asked.adapters(), strict=True)
    model.set_adapters(list(names), list(strengths))
    model.fuse_lora(adapter_names=list(names))
    model.unload_lora()
    model.to(OUT_DTYPE).save_pretrained(asked.out)
    asked.finish()


if __name__ == "__main__":
    main()
