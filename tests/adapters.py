"""One small module of every kind in every form, as files spell it, with a base tensor for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fuselora.digest import content_sha256
from fuselora.marker import FILE_NAME, encode

MODULE = "blocks.0.attn.to_q"
Shape = tuple[int, ...]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """``parts``: shapes of tensors by what follows the module's name; ``config`` of an adapter folder.

    The module's tensor in the base is called as it, then ``leaf``; ``others`` of it, also changed, alike.
    """

    name: str
    kind: str
    shape: Shape
    parts: Mapping[str, Shape]
    leaf: str = ".weight"
    config: Mapping[str, object] | None = None
    std: float = 0.5
    numbers: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, Shape] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return MODULE + self.leaf

    @property
    def homes(self) -> Mapping[str, Shape]:
        return {self.leaf: self.shape, **self.others}

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(MODULE + leaf for leaf in self.homes)

    def tensors(
        self, seed: int = 0, module: str = MODULE, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """Normal values, and the given ``numbers``."""
        noise = torch.Generator().manual_seed(seed)
        found = {
            f"{module}.{part}": torch.randn(shape, generator=noise).mul_(self.std).to(dtype)
            for part, shape in self.parts.items()
        }
        return {**found, **{f"{module}.{part}": torch.tensor(n) for part, n in self.numbers.items()}}

    def base(self, seed: int = 100, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def bases(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """Every tensor that it changes."""
        others = {MODULE + leaf: torch.ones(shape, dtype=dtype) for leaf, shape in self.others.items()}
        return {self.target: self.base(dtype=dtype), **others}

    def write(self, folder: Path, tensors: Tensors) -> Path:
        """An adapter folder where there is a configuration, else a file."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.config is None:
            save_file(dict(tensors), folder / "lora.safetensors")
            return folder / "lora.safetensors"
        named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        save_file(named, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return folder


PAIR = {"lora_down.weight": (3, 10), "lora_up.weight": (12, 3)}
LINEAR, CONV = (12, 10), (12, 10, 3, 2)
LOHA = {"hada_w1_a": (12, 3), "hada_w1_b": (3, 10), "hada_w2_a": (12, 3), "hada_w2_b": (3, 10)}
LOHA_CONV = {**LOHA, "hada_w1_b": (3, 60), "hada_w2_b": (3, 60)}
TUCKER = {"hada_w1_a": (3, 12), "hada_w2_a": (3, 12), "hada_t1": (3, 3, 3, 2), "hada_t2": (3, 3, 3, 2)}
ALPHA = {"alpha": 2.0}
LORA = {"peft_type": "LORA", "r": 3, "lora_alpha": 2}
SAVED = {**LORA, "modules_to_save": ["to_q"]}
OFT = {"peft_type": "OFT", "peft_version": "0.18.0", "oft_block_size": 5, "use_cayley_neumann": False}
SERIES = {**OFT, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5}
PEFT = {"lora_A.weight": (3, 10), "lora_B.weight": (12, 3)}

SAMPLES: tuple[Sample, ...] = (
    Sample("pair", "pair", LINEAR, PAIR, numbers=ALPHA),
    Sample("pair-peft", "pair", LINEAR, PEFT),
    Sample("pair-config", "pair", LINEAR, PEFT, config=LORA),
    Sample(
        "pair-tucker", "pair", CONV,
        {"lora_down.weight": (3, 10, 1, 1), "lora_mid.weight": (3, 3, 3, 2), "lora_up.weight": (12, 3, 1, 1)},
        numbers=ALPHA,
    ),
    Sample(
        "split", "split_pair", LINEAR,
        {"lora_down.weight": (6, 10), "lora_up.blocks.0.weight": (5, 3), "lora_up.blocks.1.weight": (7, 3)},
        numbers=ALPHA,
    ),
    Sample(
        "longcat", "split_pair", LINEAR,
        {"lora_down.weight": (6, 10), "lora_up.blocks.0.weight": (6, 3), "lora_up.blocks.1.weight": (6, 3)},
        numbers={"alpha_scale": 0.5},
    ),
    Sample("transposed", "transposed", (10, 12), PEFT, config={**LORA, "fan_in_fan_out": True}),
    Sample(
        "transposed-dora", "transposed", (10, 12), {**PEFT, "lora_magnitude_vector": (12,)},
        config={**LORA, "fan_in_fan_out": True, "use_dora": True},
    ),
    Sample("embedding", "embedding", LINEAR, {"lora_embedding_A": (3, 12), "lora_embedding_B": (10, 3)}),
    Sample(
        "embedding-dora", "embedding", LINEAR,
        {"lora_embedding_A": (3, 12), "lora_embedding_B": (10, 3), "lora_magnitude_vector": (10,)},
    ),
    Sample(
        "pair_bias", "pair_bias", (12,), {**PEFT, "lora_B.bias": (12,)},
        leaf=".bias", others={".weight": LINEAR}, numbers=ALPHA,
    ),
    Sample(
        "experts", "experts", (4, 12, 10), {"lora_A.weight": (12, 10), "lora_B.weight": (12, 12)},
        leaf=".gate", config={**LORA, "target_parameters": ["to_q.gate"]},
    ),
    Sample(
        "experts-in-out", "experts", (4, 10, 12), {"lora_A.weight": (12, 10), "lora_B.weight": (12, 12)},
        leaf=".gate", config={**LORA, "target_parameters": ["to_q.gate"]},
    ),
    Sample("pair-conv", "pair", CONV, {"lora_down.weight": (3, 10, 3, 2), "lora_up.weight": (12, 3, 1, 1)}),
    Sample("pair-conv1d", "pair", (12, 10, 3), {"lora_A.weight": (3, 10, 3), "lora_B.weight": (12, 3, 1)}),
    Sample("pair-1x1", "pair", (12, 10, 1, 1), PAIR),
    Sample("dora", "pair", LINEAR, {**PAIR, "dora_scale": (12, 1)}, numbers=ALPHA),
    Sample("dora-columns", "pair", LINEAR, {**PAIR, "dora_scale": (1, 10)}, numbers=ALPHA),
    Sample("dora-peft", "pair", LINEAR, {**PAIR, "lora_magnitude_vector": (12,)}),
    Sample("loha", "loha", LINEAR, LOHA, numbers=ALPHA),
    Sample("loha-conv", "loha", CONV, LOHA_CONV),
    Sample("loha-tucker", "loha", CONV, {**LOHA, **TUCKER}, numbers=ALPHA),
    Sample("loha-dora", "loha", LINEAR, {**LOHA, "dora_scale": (12, 1)}),
    Sample("lokr-full", "lokr", LINEAR, {"lokr_w1": (3, 2), "lokr_w2": (4, 5)}),
    Sample("lokr", "lokr", LINEAR, {"lokr_w1": (3, 2), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 5)}),
    Sample(
        "lokr-both", "lokr", LINEAR,
        {"lokr_w1_a": (3, 2), "lokr_w1_b": (2, 2), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 5)},
        numbers=ALPHA,
    ),
    Sample(
        "lokr-tucker", "lokr", CONV,
        {"lokr_w1": (3, 2), "lokr_w2_a": (2, 4), "lokr_w2_b": (2, 5), "lokr_t2": (2, 2, 3, 2)},
    ),
    Sample("lokr-conv", "lokr", CONV, {"lokr_w1": (3, 2), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 30)}),
    Sample("lokr-dora", "lokr", LINEAR, {"lokr_w1": (3, 2), "lokr_w2": (4, 5), "dora_scale": (1, 10)}),
    Sample(
        "glora", "glora", LINEAR,
        {"a1.weight": (10, 2), "a2.weight": (2, 10), "b1.weight": (12, 2), "b2.weight": (2, 10)},
        numbers=ALPHA,
    ),
    Sample(
        "glora-old", "glora", LINEAR,
        {"a2.weight": (10, 2), "a1.weight": (2, 10), "b2.weight": (12, 2), "b1.weight": (2, 10)},
    ),
    Sample(
        "glora-conv", "glora", CONV,
        {"a1.weight": (10, 2, 1, 1), "a2.weight": (2, 10, 1, 1), "b1.weight": (12, 2, 1, 1),
         "b2.weight": (2, 10, 3, 2)},
    ),
    Sample("diff", "diff", LINEAR, {"diff": LINEAR}),
    Sample("diff-conv", "diff", CONV, {"diff": CONV}),
    Sample("diff_b", "diff_b", (12,), {"diff_b": (12,)}, leaf=".bias"),
    Sample("diff_m", "diff_m", (1, 2, 6), {"diff_m": (1, 2, 6)}, leaf=".modulation"),
    Sample("w_norm", "w_norm", (12,), {"w_norm": (12,)}),
    Sample("b_norm", "b_norm", (12,), {"b_norm": (12,)}, leaf=".bias"),
    Sample("oft", "oft", LINEAR, {"oft_blocks": (3, 4, 4), "rescale": (12, 1)}, numbers={"alpha": 0.0}),
    Sample("oft-constrained", "oft", CONV, {"oft_blocks": (4, 3, 3)}, numbers={"alpha": 0.125}),
    Sample("boft", "boft", LINEAR, {"oft_blocks": (2, 6, 2, 2), "rescale": (12, 1)}),
    Sample("boft-constrained", "boft", CONV, {"oft_blocks": (2, 2, 6, 6)}, numbers={"alpha": 0.125}),
    Sample("oft-peft", "peft_oft", LINEAR, {"oft_R.weight": (2, 10)}, config=OFT),
    Sample("oft-series", "peft_oft", LINEAR, {"oft_R.weight": (2, 10)}, config=SERIES, std=0.1),
    Sample("oft-shared", "peft_oft", CONV, {"oft_R.weight": (1, 10)}, config={**OFT, "block_share": True}),
    Sample("coft", "peft_oft", LINEAR, {"oft_R.weight": (2, 10)}, config={**OFT, "coft": True, "eps": 0.5}),
    Sample("oft-embedding", "peft_oft_embedding", LINEAR, {"oft_embedding_R.weight": (2, 10)}, config=OFT),
    Sample("boft-peft", "peft_boft", LINEAR, {"boft_R": (1, 2, 5, 5), "boft_s": (12, 1)}),
    Sample("boft-stages", "peft_boft", (12, 16), {"boft_R": (3, 4, 4, 4), "boft_s": (12, 1)}),
    Sample("ia3", "ia3", LINEAR, {"weight": (12,)}, numbers={"on_input": 0.0}),
    Sample("ia3-inputs", "ia3", CONV, {"weight": (1, 10, 1, 1)}, numbers={"on_input": 1.0}),
    Sample("ia3-peft", "peft_ia3", LINEAR, {"ia3_l": (12, 1)}),
    Sample("ia3-peft-inputs", "peft_ia3", LINEAR, {"ia3_l": (1, 10)}),
    Sample(
        "ia3-peft-conv", "peft_ia3", (12, 12, 3), {"ia3_l": (1, 12, 1)},
        config={"peft_type": "IA3", "feedforward_modules": ["to_q"]},
    ),
    Sample("ia3-bias", "peft_ia3_b", (12,), {"ia3_l": (12, 1)}, leaf=".bias", others={".weight": LINEAR}),
    Sample("set_weight", "set_weight", LINEAR, {"set_weight": LINEAR}),
    Sample("replace", "replace", LINEAR, {"weight": LINEAR}, config=SAVED),
    Sample("replace_b", "replace_b", (12,), {"bias": (12,)}, leaf=".bias", config=SAVED),
    Sample("replace_scale", "replace_scale", (12,), {"scale": (12,)}, leaf=".scale", config=SAVED),
)  # fmt: skip


def say_content(out: Path, lora: Path) -> None:
    """Has the marker name this LoRA's content for its first entry."""
    path = lora / "adapter_model.safetensors" if lora.is_dir() else lora
    document = json.loads((out / FILE_NAME).read_text("utf-8"))
    document["loras"][0]["content_sha256"] = content_sha256(path)
    (out / FILE_NAME).write_bytes(encode(document))
