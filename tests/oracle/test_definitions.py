"""The float64 definitions against the modules of PEFT and LyCORIS, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lycoris.functional import boft, diag_oft
from lycoris.functional.general import weight_decompose
from lycoris.modules.ia3 import IA3Module
from peft import BOFTConfig, IA3Config, LoraConfig, OFTConfig, get_peft_model
from torch import nn

from fuselora.definitions import changed, difference
from fuselora.kinds.settings import Rotation, Settings
from tests.oracle.lycoris_side import LAYERS, Layer, Model, lycoris

F64 = torch.float64
Parts = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in every run, and no attempt of PEFT's to compile CUDA code."""
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)
    torch.manual_seed(0)


def double(parts: dict[str, torch.Tensor]) -> Parts:
    return {
        name.removesuffix(".weight"): tensor.double() for name, tensor in parts.items() if name != "alpha"
    }


def diagonal(blocks: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole


def near(found: torch.Tensor, wanted: torch.Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted.detach().to(found.dtype), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("loha", {"lora_dim": 4}),
        ("loha", {"lora_dim": 4, "use_tucker": True}),
        ("lokr", {"lora_dim": 1, "factor": 4}),
        ("lokr", {"lora_dim": 2, "decompose_both": True, "use_tucker": True}),
        ("lokr", {"lora_dim": 8, "full_matrix": True}),
        ("glora", {"lora_dim": 4}),
    ],
)
def test_sums_of_lycoris(kind: str, options: dict[str, Any], layer: str) -> None:
    trained = lycoris(kind, LAYERS[layer](), alpha=options["lora_dim"], **options)
    found = difference(kind, double(trained.saved), trained.weight)
    near(trained.weight + found.value, trained.changed)
    assert bool((found.size >= found.value.abs() - 1e-9).all())


# PEFT


def adapted(layer: nn.Module, config: Any, scale: float = 0.3) -> tuple[Any, Parts, torch.Tensor]:
    """A layer with an adapter of random numbers, its parameters by name, and its weight before."""
    weight = layer.double().weight.detach().clone()  # type: ignore[operator]
    model: Any = get_peft_model(Model(layer), config).double()  # type: ignore[arg-type]
    wrapped = model.base_model.model.to_q
    wrapped.double()
    own = {}
    for name, parameter in wrapped.named_parameters():
        if "base_layer" not in name:
            nn.init.normal_(parameter, std=scale)
            own[name.split(".")[0]] = parameter.detach().clone()
    wrapped.merge()
    return wrapped.get_base_layer(), own, weight


PEFT_LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(16, 12),
    "conv2d": lambda: nn.Conv2d(16, 12, 2),
}


@pytest.mark.parametrize("layer", PEFT_LAYERS)
@pytest.mark.parametrize("terms", [None, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("coft", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_oft_of_peft(layer: str, terms: int | None, coft: bool, share: bool) -> None:
    config = OFTConfig(
        target_modules=["to_q"], oft_block_size=4, coft=coft, eps=0.2, block_share=share,
        use_cayley_neumann=terms is not None, num_cayley_neumann_terms=terms or 5,
    )  # fmt: skip
    merged, own, weight = adapted(PEFT_LAYERS[layer](), config)
    settings = Settings(rotation=Rotation(terms, 0.2 if coft else None, share))
    found = changed("peft_oft", {"oft_r": own["oft_R"]}, weight, 1.0, settings)
    near(found.value, merged.weight, rtol=1e-6)


@pytest.mark.parametrize("share", [False, True])
def test_oft_of_pefts_embedding(share: bool) -> None:
    config = OFTConfig(target_modules=["to_q"], oft_block_size=4, block_share=share, use_cayley_neumann=True)
    merged, own, weight = adapted(nn.Embedding(20, 8), config)
    settings = Settings(rotation=Rotation(5, None, share))
    found = changed("peft_oft_embedding", {"oft_embedding_r": own["oft_embedding_R"]}, weight, 1.0, settings)
    near(found.value, merged.weight, rtol=1e-6)


@pytest.mark.parametrize("layer", PEFT_LAYERS)
def test_boft_of_peft(layer: str) -> None:
    merged, own, weight = adapted(
        PEFT_LAYERS[layer](), BOFTConfig(target_modules=["to_q"], boft_block_size=4)
    )
    parts = {"boft_r": own["boft_R"], "boft_s": own["boft_s"]}
    near(changed("peft_boft", parts, weight, 1.0, Settings()).value, merged.weight, rtol=1e-6)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_butterflies_of_peft(stages: int) -> None:
    """PEFT makes more than one stage only where its CUDA code compiles; its permutations are plain Python."""
    blocks, weight = torch.randn(stages, 4, 4, 4, dtype=F64), torch.randn(12, 16, dtype=F64)
    config = BOFTConfig(target_modules=["to_q"], boft_block_size=4)
    model: Any = get_peft_model(Model(nn.Linear(16, 12)), config)
    theirs = model.base_model.model.to_q
    wanted = weight.T
    for i, stage in enumerate(blocks):
        order = theirs.block_butterfly_perm(16, 4 >> i, 2, stages - 1)
        apart = theirs.perm2mat(order).double()
        wanted = apart @ diagonal(theirs.cayley_batch(stage)) @ apart.T @ wanted
    found = changed("peft_boft", {"boft_r": blocks}, weight, 1.0, Settings())
    near(found.value, wanted.T, rtol=1e-6)


@pytest.mark.parametrize("layer", PEFT_LAYERS)
@pytest.mark.parametrize("feedforward", [False, True])
def test_ia3_of_peft(layer: str, feedforward: bool) -> None:
    names = ["to_q"] if feedforward else []
    config = IA3Config(target_modules=["to_q"], feedforward_modules=names)
    plain = PEFT_LAYERS[layer]()
    bias = plain.bias.detach().double()
    merged, own, weight = adapted(plain, config)
    parts, settings = {"ia3_l": own["ia3_l"]}, Settings(feedforward=feedforward)
    near(changed("peft_ia3", parts, weight, 1.0, settings).value, merged.weight)
    new = bias if feedforward else changed("peft_ia3_b", parts, bias, 1.0, settings).value
    near(new, merged.bias)


@pytest.mark.parametrize("rank", [1, 4])
def test_dora_of_peft(rank: int) -> None:
    config = LoraConfig(target_modules=["to_q"], r=rank, lora_alpha=3, use_dora=True)
    merged, own, weight = adapted(nn.Linear(16, 12), config)
    parts = {"down": own["lora_A"], "up": own["lora_B"], "magnitude": own["lora_magnitude_vector"]}
    near(changed("pair", parts, weight, 3 / rank, Settings()).value, merged.weight)


def test_dora_of_pefts_convolution() -> None:
    config = LoraConfig(target_modules=["to_q"], r=2, lora_alpha=2, use_dora=True)
    merged, own, weight = adapted(nn.Conv2d(16, 12, 3), config)
    parts = {"down": own["lora_A"], "up": own["lora_B"], "magnitude": own["lora_magnitude_vector"]}
    near(changed("pair", parts, weight, 1.0, Settings()).value, merged.weight)


def test_an_embedding_of_peft() -> None:
    merged, own, weight = adapted(nn.Embedding(20, 8), LoraConfig(target_modules=["to_q"], r=4, lora_alpha=4))
    parts = {"embedding_down": own["lora_embedding_A"], "embedding_up": own["lora_embedding_B"]}
    near(weight + difference("embedding", parts, weight).value, merged.weight)


def test_dora_of_pefts_embedding() -> None:
    config = LoraConfig(target_modules=["to_q"], r=4, lora_alpha=4, use_dora=True)
    merged, own, weight = adapted(nn.Embedding(20, 8), config)
    parts = {
        "embedding_down": own["lora_embedding_A"],
        "embedding_up": own["lora_embedding_B"],
        "magnitude": own["lora_magnitude_vector"],
    }
    near(changed("embedding", parts, weight, 1.0, Settings()).value, merged.weight)


class Experts(nn.Module):
    """A parameter of three dimensions."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize("shape", [(3, 8, 6), (3, 6, 8), (3, 6, 6)])
def test_experts_of_peft(shape: tuple[int, ...]) -> None:
    model: Any = nn.ModuleDict({"mlp": Experts(*shape)})
    config = LoraConfig(target_modules=[], target_parameters=["mlp.gate"], r=2, lora_alpha=2)
    adapted_model: Any = get_peft_model(model, config).double()
    wrapped = adapted_model.base_model.model.mlp
    weight = wrapped.get_param().detach().clone()
    nn.init.normal_(wrapped.lora_B["default"].weight)
    parts = {
        "down": wrapped.lora_A["default"].weight.detach(),
        "up": wrapped.lora_B["default"].weight.detach(),
    }
    near(difference("experts", parts, weight).value, wrapped.get_delta_weight("default"))


# LyCORIS


def turned(
    kind: str, layer: Layer, shape: tuple[int, ...], alpha: float, rescaled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition's weight and LyCORIS', which inverts in float32."""
    weight, blocks = layer.weight.detach(), torch.randn(shape) / 5
    rescale = torch.randn(160, *[1] * (weight.dim() - 1)) if rescaled else None
    theirs = (boft if kind == "boft" else diag_oft).diff_weight
    wanted = weight + theirs(weight, blocks, rescale, constraint=alpha * 160)
    parts = {"oft_blocks": blocks} | ({} if rescale is None else {"rescale": rescale})
    return changed(kind, double(parts), weight.double(), 1.0, Settings(alpha=alpha)).value, wanted


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("alpha", [0.0, 0.01])
@pytest.mark.parametrize("rescaled", [False, True])
def test_oft_of_lycoris(layer: str, alpha: float, rescaled: bool) -> None:
    near(*turned("oft", LAYERS[layer](), (40, 4, 4), alpha, rescaled), rtol=2e-5)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("alpha", [0.0, 0.01])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_boft_of_lycoris(layer: str, alpha: float, stages: int) -> None:
    near(*turned("boft", LAYERS[layer](), (stages, 16, 10, 10), alpha, stages > 1), rtol=2e-5)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("on_input", [False, True])
def test_ia3_of_lycoris(layer: str, on_input: bool) -> None:
    module = IA3Module("x", LAYERS[layer](), train_on_input=on_input)
    nn.init.normal_(module.weight)
    weight = module.org_weight.double()
    parts, settings = {"weight": module.weight.detach().double()}, Settings(on_input=on_input)
    near(changed("ia3", parts, weight, 1.0, settings).value, module.make_weight(), rtol=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("on_out", [True, False])
def test_dora_of_lycoris(layer: str, on_out: bool) -> None:
    trained = lycoris("loha", LAYERS[layer](), lora_dim=4, alpha=4)
    weight = trained.weight
    along = [1] * weight.dim()
    along[0 if on_out else 1] = weight.shape[0 if on_out else 1]
    magnitude = torch.randn(along, dtype=F64)
    wanted = weight_decompose(trained.changed, magnitude, wd_on_out=on_out)
    parts = {**double(trained.saved), "dora_scale": magnitude}
    near(changed("loha", parts, weight, 1.0, Settings()).value, wanted, rtol=1e-5)
