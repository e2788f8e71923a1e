"""Z-Image, in diffusers' names and in those of ComfyUI's single files.

Sources: the published checkpoints' tensor lists; diffusers' ZImageTransformer2DModel and its
``convert_z_image_transformer_checkpoint_to_diffusers``, which the tests hold every row against.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Kin, Measure
from fuselora.families.renames import Renames, Rows, canonical_names, split

BLOCKS = ("layers.{n}", "noise_refiner.{n}", "context_refiner.{n}")
ROWS: Rows = (
    *(split(f"{b}.attention.qkv", *(f"{b}.attention.to_{part}" for part in "qkv")) for b in BLOCKS),
    *((f"{b}.attention.out", f"{b}.attention.to_out.0") for b in BLOCKS),
    *((f"{b}.attention.{part}_norm", f"{b}.attention.norm_{part}") for b in BLOCKS for part in "qk"),
    ("x_embedder", "all_x_embedder.2-1"),
    ("final_layer.linear", "all_final_layer.2-1.linear"),
    ("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1"),
)
SAME = (
    *(f"{b}.feed_forward.w{n}" for b in BLOCKS for n in (1, 2, 3)),
    *(
        f"{b}.{norm}"
        for b in BLOCKS
        for norm in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
    ),
    *(f"{b}.adaLN_modulation.0" for b in BLOCKS[:2]),
    *(
        "x_pad_token",
        "cap_pad_token",
        "t_embedder.mlp.0",
        "t_embedder.mlp.2",
        "cap_embedder.0",
        "cap_embedder.1",
    ),
)
# ``attention.to.q`` of some trainers
DOTTED = tuple((f"{b}.attention.to.{part}", f"{b}.attention.to_{part}") for b in BLOCKS for part in "qkv")

Z_IMAGE = Family(
    name="z-image",
    known_as=r"(?<![a-z])z[-_ ]?image",
    canonical="diffusers",
    layouts={"native": Renames(ROWS), "dotted": Renames(DOTTED)},
    # Anime-Z's files have them beside ``to.q`` and ``to_out.0``; diffusers' LoRA converter skips them
    repeats=r"\.attention\.(?:qkv|out)$",
    names=canonical_names(ROWS) | frozenset(SAME),
    block="layers.{n}.",
    kin=(Kin(("Z-Image", "Z-Image-Turbo"), (), 30, {"all_x_embedder.2-1.weight": (3840, 64)}),),
    measures=(
        Measure(
            "dim",
            ("all_x_embedder.2-1.weight", 0),
            {
                0: (*(f"{b}.attention.to_{part}.weight" for b in BLOCKS for part in "qkv"),),
                1: (*(f"{b}.feed_forward.w1.weight" for b in BLOCKS),),
            },
        ),
    ),
    few_step=(
        FewStep(
            name="Z-Image-Turbo's distillation patch",
            pattern=r"z[-_]image[-_]turbo[-_]distill[-_]?patch",
            # its makers on training Z-Image-Turbo: num_inference_steps=8, cfg_scale=1
            source="DiffSynth-Studio/Z-Image-Turbo-DistillPatch",
            num_inference_steps=8,
            remark="DiffSynth runs it at cfg_scale 1, without guidance",
        ),
        FewStep(
            name="Z-Image-Fun's distillation",
            pattern=r"z[-_]image[-_]fun[-_]lora[-_]distill",
            # its model card; the steps are in the name
            source="alibaba-pai/Z-Image-Fun-Lora-Distill",
            remark="guidance is distilled as well",
        ),
    ),
)
