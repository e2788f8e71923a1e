"""PEFT: wrap the transformer, ``merge_and_unload``, ``save_pretrained``."""

from __future__ import annotations

from peft import PeftModel
from peft.tuners.lora import LoraLayer

from benchmark.peers import OUT_DTYPE, task
from benchmark.peers.transformer import load


def main() -> None:
    """Merge all adapters at once."""
    asked = task()
    model = load(asked)
    (first, folder, _), *others = asked.adapters()
    wrapped = PeftModel.from_pretrained(model, folder, adapter_name=first)
    for name, path, _ in others:
        wrapped.load_adapter(path, adapter_name=name)
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            for name, _, strength in asked.adapters():
                module.set_scale(name, strength)
    merged = wrapped.merge_and_unload(adapter_names=[name for name, _, _ in asked.adapters()])
    merged.to(OUT_DTYPE).save_pretrained(asked.out)
    asked.finish()


if __name__ == "__main__":
    main()
