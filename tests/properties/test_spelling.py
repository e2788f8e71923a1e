"""Any spelling of the same adapter makes the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fuselora
from tests.adapters import MODULE, SAMPLES, Sample
from tests.properties.bounds import examples
from tests.small import noise, raw

LAYERS = {"blocks.0.attn.to_q": (12, 10), "blocks.1.ffn.net.0.proj": (9, 10)}
RANK, ALPHA = 4, 6.0
# before a module's name, and what it makes of its dots
PREFIXES: dict[str, str] = {
    "": ".",
    "diffusion_model.": ".",
    "transformer.": ".",
    "model.diffusion_model.": ".",
    "base_model.model.": ".",
    "base_model.model.transformer.": ".",
    "unet.": ".",
    "lora_unet_": "_",
    "lora_transformer_": "_",
    "lycoris_": "_",
    "lora___lorahyphen___": "___lorahyphen___",
}
STYLES: tuple[tuple[str, str], ...] = (
    ("lora_down.weight", "lora_up.weight"),
    ("lora_A.weight", "lora_B.weight"),
    ("lora_A.default.weight", "lora_B.default.weight"),
    ("lora.down.weight", "lora.up.weight"),
    ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
    ("lora_A", "lora_B"),
)
ALPHAS: dict[str, torch.Tensor] = {
    "float32": torch.tensor(ALPHA),
    "int64": torch.tensor(int(ALPHA)),
    "bfloat16": torch.tensor([ALPHA], dtype=torch.bfloat16),
    "float16": torch.tensor([[ALPHA]], dtype=torch.float16),
    "float64": torch.tensor(ALPHA, dtype=torch.float64),
}
PLACES = (*ALPHAS, "option", "lora_alpha", "ss_network_alpha", "lora_adapter_metadata", "adapter_config")
METADATA = {
    "lora_alpha": {"lora_alpha": str(ALPHA)},
    "ss_network_alpha": {"ss_network_alpha": str(ALPHA), "ss_network_dim": str(RANK)},
    "lora_adapter_metadata": {
        "lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})
    },
}
Written = Callable[["Spelling"], dict[str, bytes]]


@dataclass(frozen=True)
class Spelling:
    """Of one file: each layer in its own style, as DMD2 has it, under one prefix."""

    prefix: str
    styles: tuple[tuple[str, str], ...]
    alpha: str
    reverse: bool
    sharded: bool = False

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for seed, (module, style) in enumerate(zip(LAYERS, self.styles, strict=True)):
            name = self.prefix + module.replace(".", PREFIXES[self.prefix])
            n_out, n_in = LAYERS[module]
            found[f"{name}.{style[0]}"] = noise(RANK, n_in, seed=2 * seed)
            found[f"{name}.{style[1]}"] = noise(n_out, RANK, seed=2 * seed + 1)
            if self.alpha in ALPHAS:
                found[f"{name}.alpha"] = ALPHAS[self.alpha].clone()
        return dict(reversed(found.items())) if self.reverse else found


SPELLINGS = st.builds(
    Spelling,
    st.sampled_from([*PREFIXES]),
    st.tuples(st.sampled_from(STYLES), st.sampled_from(STYLES)),
    st.sampled_from(PLACES),
    st.booleans(),
    st.booleans(),
)


def write(folder: Path, spelling: Spelling) -> Path:
    """A file, an index of two shards, or a folder with a configuration that holds one of these."""
    folder.mkdir()
    configured, tensors = spelling.alpha == "adapter_config", spelling.tensors()
    stem = "adapter_model" if configured else "lora"
    metadata = METADATA.get(spelling.alpha, {"format": "pt"})
    path = folder / f"{stem}.safetensors"
    if spelling.sharded:
        path = folder / f"{stem}.safetensors.index.json"
        files = [f"{stem}-{n}-of-00002.safetensors" for n in ("00001", "00002")]
        weight_map = {name: files[at % 2] for at, name in enumerate(tensors)}
        for file in files:
            held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
            save_file(held, folder / file, metadata)
        path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    else:
        save_file(tensors, path, metadata)
    if not configured:
        return path
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def spelled(tensors: Mapping[str, torch.Tensor], module: str, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one module with its name under a prefix."""
    name = prefix + module.replace(".", PREFIXES[prefix])
    return {name + key.removeprefix(module): tensor for key, tensor in tensors.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """What a merge of a spelling makes of the base's tensors, as bytes."""
    root = tmp_path_factory.mktemp("spellings")
    base = root / "base.safetensors"
    tensors = {
        f"{module}.weight": noise(*shape, seed=9, dtype=torch.bfloat16) for module, shape in LAYERS.items()
    }
    save_file(tensors, base)
    count = iter(range(1_000_000))

    def merged(spelling: Spelling) -> dict[str, bytes]:
        folder = root / str(next(count))
        lora = write(folder, spelling)
        alphas = [str(ALPHA)] if spelling.alpha == "option" else []
        fuselora.merge(base=base, loras=[f"{lora}:0.5"], out=folder / "out", alphas=alphas, digest=False)
        return {name: raw(tensor) for name, tensor in load_file(folder / "out" / base.name).items()}

    return merged


def test_the_plain_spelling_adds_the_pair(written: Written) -> None:
    """What all others are compared with."""
    plain = Spelling("", (STYLES[0], STYLES[0]), "float32", False)
    tensors = plain.tensors()
    for name, data in written(plain).items():
        module = name.removesuffix(".weight")
        up, down = (tensors[f"{module}.lora_{part}.weight"].double() for part in ("up", "down"))
        old = noise(*LAYERS[module], seed=9, dtype=torch.bfloat16).double()
        new = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(old.shape).double()
        torch.testing.assert_close(new, old + 0.5 * ALPHA / RANK * (up @ down), rtol=2**-8, atol=2**-8)


@examples(40)
@given(spelling=SPELLINGS)
def test_any_spelling_makes_the_same_bytes(spelling: Spelling, written: Written) -> None:
    assert written(spelling) == written(Spelling("", (STYLES[0], STYLES[0]), "float32", False))


@examples(40)
@given(sample=st.sampled_from([s for s in SAMPLES if s.config is None]), prefix=st.sampled_from([*PREFIXES]))
def test_a_kind_under_any_prefix_makes_the_same_bytes(
    sample: Sample, prefix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, found = tmp_path_factory.mktemp("kind"), []
    save_file(sample.bases(), folder / "base.safetensors")
    for name in ("", prefix):
        lora, out = folder / f"{name}.safetensors", folder / f"out-{name}"
        save_file(spelled(sample.tensors(), MODULE, name), lora)
        fuselora.merge(base=folder / "base.safetensors", loras=[lora], out=out, digest=False, overwrite=True)
        tensors = load_file(out / "base.safetensors")
        found.append({key: raw(tensor) for key, tensor in tensors.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("style", STYLES, ids=lambda style: str(style[0]))
def test_every_prefix_with_every_style(prefix: str, style: tuple[str, str], written: Written) -> None:
    plain = written(Spelling("", (STYLES[0], STYLES[0]), "float32", False))
    assert written(Spelling(prefix, (style, style), "float32", False)) == plain
