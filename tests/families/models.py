"""Each family as diffusers has it: its class, small in blocks and true in width, and its base converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers.loaders import single_file_utils

from fuselora.families.chroma import CHROMA
from fuselora.families.flux1 import FLUX1
from fuselora.families.flux2 import FLUX2
from fuselora.families.hunyuan_video import HUNYUAN_VIDEO
from fuselora.families.ltx2 import LTX_2
from fuselora.families.ltx_video import LTX_VIDEO
from fuselora.families.minimax_h3 import MINIMAX_H3
from fuselora.families.sd import SD
from fuselora.families.sd3 import SD3
from fuselora.families.sdxl import SDXL
from fuselora.families.z_image import Z_IMAGE
from tests import listings

if TYPE_CHECKING:
    from fuselora.families import Family, Layout

Tensors = Mapping[str, torch.Tensor]
converters: Any = single_file_utils  # without annotations
unet: Any = diffusers.UNet2DConditionModel
SHOWN = 8  # columns of a weight that are kept; converters look at rows alone
SGM_PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class Model:
    """``convert`` takes tensors of ``layout`` to diffusers' names and rows."""

    family: Family
    layout: Layout
    make: Callable[[], torch.nn.Module]
    convert: Callable[[dict[str, torch.Tensor]], Tensors]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The class's tensors at true width."""
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in self.make().state_dict().items()}

    def converted(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """By diffusers, which may take the dictionary apart."""
        return dict(self.convert(dict(tensors)))


def _class(name: str, **config: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(diffusers, name)(**config)


def _h3(order: str) -> Callable[[dict[str, torch.Tensor]], Tensors]:
    config = {"num_attention_heads": 56, "attention_head_dim": 128}
    convert = converters.convert_minimax_h3_transformer_checkpoint_to_diffusers
    return lambda tensors: convert(tensors, config, order)


def _unet(model: Callable[[], torch.nn.Module]) -> Callable[[dict[str, torch.Tensor]], Tensors]:
    def convert(tensors: dict[str, torch.Tensor]) -> Tensors:
        with torch.device("meta"):
            config = dict(model().config)  # type: ignore[arg-type]
        prefixed = {SGM_PREFIX + name: tensor for name, tensor in tensors.items()}
        found: Tensors = converters.convert_ldm_unet_checkpoint(prefixed, config)
        return found

    return convert


def _sdxl() -> torch.nn.Module:
    return unet.from_config(listings.config("sdxl-base-unet"))  # type: ignore[no-any-return]


_sd = _class("UNet2DConditionModel", cross_attention_dim=768)  # the defaults are Stable Diffusion 1's
H3 = _class("MiniMaxH3Transformer3DModel", num_layers=1, num_refiner_layers=1)
MODELS = {
    "flux.1": Model(
        FLUX1,
        "native",
        _class("FluxTransformer2DModel", num_layers=1, num_single_layers=1, guidance_embeds=True),
        converters.convert_flux_transformer_checkpoint_to_diffusers,
    ),
    "flux.2": Model(
        FLUX2,
        "native",
        _class("Flux2Transformer2DModel", num_layers=1, num_single_layers=1),
        converters.convert_flux2_transformer_checkpoint_to_diffusers,
    ),
    "chroma": Model(
        CHROMA,
        "native",
        _class("ChromaTransformer2DModel", num_layers=1, num_single_layers=1, approximator_layers=2),
        converters.convert_chroma_transformer_checkpoint_to_diffusers,
    ),
    "z-image": Model(
        Z_IMAGE,
        "native",
        _class("ZImageTransformer2DModel", n_layers=1, n_refiner_layers=1),
        converters.convert_z_image_transformer_checkpoint_to_diffusers,
    ),
    "sd3": Model(
        SD3,
        "native",
        _class(
            "SD3Transformer2DModel",
            num_layers=3,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
            caption_projection_dim=1152,
        ),
        converters.convert_sd3_transformer_checkpoint_to_diffusers,
    ),
    "sd": Model(SD, "sgm", _sd, _unet(_sd)),
    "sdxl": Model(SDXL, "sgm", _sdxl, _unet(_sdxl)),
    "hunyuan-video": Model(
        HUNYUAN_VIDEO,
        "native",
        _class("HunyuanVideoTransformer3DModel", num_layers=1, num_single_layers=1, num_refiner_layers=1),
        converters.convert_hunyuan_video_transformer_to_diffusers,
    ),
    "ltx-video": Model(
        LTX_VIDEO,
        "native",
        _class("LTXVideoTransformer3DModel", num_layers=1),
        converters.convert_ltx_transformer_checkpoint_to_diffusers,
    ),
    "ltx-2": Model(
        LTX_2,
        "native",
        _class("LTX2VideoTransformer3DModel", num_layers=1),
        converters.convert_ltx2_transformer_to_diffusers,
    ),
    "minimax-h3": Model(MINIMAX_H3, "native", H3, _h3("stacked")),
    "minimax-h3 raw": Model(MINIMAX_H3, "raw", H3, _h3("interleaved")),
}
