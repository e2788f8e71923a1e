"""Wan 2.1 and 2.2, text, image and VACE variants, in Wan's own names and in diffusers'.

Sources: the published checkpoints' tensor lists; diffusers' WanTransformer3DModel and its
``convert_wan_transformer_to_diffusers``, which the tests hold every row against. Note that
``norm2`` and ``norm3`` change places between the layouts.
"""

from __future__ import annotations

from fuselora.families.family import Family
from fuselora.families.few_step import FewStep
from fuselora.families.kin import Branch, Kin, Measure, SkipRule
from fuselora.families.pattern import split_leaf
from fuselora.families.renames import Renames
from fuselora.families.wan_classes import WAN_CLASSES

# (native, diffusers), inside one transformer block
BLOCK = (
    ("self_attn.q", "attn1.to_q"),
    ("self_attn.k", "attn1.to_k"),
    ("self_attn.v", "attn1.to_v"),
    ("self_attn.o", "attn1.to_out.0"),
    ("self_attn.norm_q", "attn1.norm_q"),
    ("self_attn.norm_k", "attn1.norm_k"),
    ("cross_attn.q", "attn2.to_q"),
    ("cross_attn.k", "attn2.to_k"),
    ("cross_attn.v", "attn2.to_v"),
    ("cross_attn.o", "attn2.to_out.0"),
    ("cross_attn.norm_q", "attn2.norm_q"),
    ("cross_attn.norm_k", "attn2.norm_k"),
    ("cross_attn.k_img", "attn2.add_k_proj"),
    ("cross_attn.v_img", "attn2.add_v_proj"),
    ("cross_attn.norm_k_img", "attn2.norm_added_k"),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
    ("norm3", "norm2"),
    ("norm2", "norm3"),
    ("modulation", "scale_shift_table"),
)
# outside the blocks
STEM = (
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),  # of first-and-last-frame models
    ("head.head", "proj_out"),
    ("head.modulation", "scale_shift_table"),
    ("vace_blocks.{n}.before_proj", "vace_blocks.{n}.proj_in"),
    ("vace_blocks.{n}.after_proj", "vace_blocks.{n}.proj_out"),
)
BLOCKS = ("blocks.{n}", "vace_blocks.{n}")
ROWS = STEM + tuple((f"{block}.{native}", f"{block}.{ours}") for block in BLOCKS for native, ours in BLOCK)

IMAGE_MODULES = (
    "blocks.{n}.cross_attn.k_img",
    "blocks.{n}.cross_attn.v_img",
    "blocks.{n}.cross_attn.norm_k_img",
    "img_emb.proj.{n}",
)
VACE_MODULES = (
    *(f"vace_blocks.{{n}}.{native}" for native, _ in BLOCK),
    "vace_blocks.{n}.before_proj",
    "vace_blocks.{n}.after_proj",
    "vace_patch_embedding",
)

IMAGE_BRANCH = SkipRule(
    reason="image branch of Wan2.1, which this base does not have",
    modules=IMAGE_MODULES,
    # Wan2.2-I2V-A14B takes the image as 36 input channels and has no image branch; LightX2V
    # publishes the Wan2.1-I2V distill file for it (ModelTC/LightX2V issue 1246).
    witness="patch_embedding.weight",
    axis=1,
    sizes=(36,),
)

ATTENTION = tuple(f"{attention}.{linear}" for attention in ("self_attn", "cross_attn") for linear in "qkvo")
MEASURES = (
    Measure(
        "dim",
        ("patch_embedding.weight", 0),
        {
            0: (
                *(f"{block}.{module}.weight" for block in BLOCKS for module in (*ATTENTION, "ffn.2")),
                "patch_embedding.weight",
                "time_embedding.0.weight",
            ),
            1: tuple(f"{block}.ffn.0.weight" for block in BLOCKS),
            2: tuple(f"{block}.modulation" for block in BLOCKS),
        },
    ),
    Measure("in_channels", ("patch_embedding.weight", 1), {1: ("patch_embedding.weight",)}),
)
BRANCHES = (
    Branch("image", IMAGE_MODULES, "blocks.0.cross_attn.k_img.bias"),
    Branch("vace", VACE_MODULES, "vace_blocks.0.before_proj.bias"),
)
DMD_TIMESTEPS = "the timesteps are 1000, 757 and 522, with fresh noise after each but the last"
# Names as lightx2v, Kijai, Comfy-Org and FastVideo publish them on the Hub; numbers in a name (4steps) are
# read from the name itself.
FEW_STEP = (
    FewStep(
        name="Wan2.2-Lightning",
        # its folders of V1 and V1.1, and Kijai's files; later releases do not say what they sample with
        pattern=r"4steps-lora-rank64-seko-v1(?:\.1)?(?![.\d])|wan2\.2-lightning_[ti]2v",
        # sample_steps, sample_guide_scale, sample_shift in wan/configs/wan_{t2v,i2v}_A14B.py; generate.py
        # warns of any other solver, "because it's used in distillation"
        source="ModelTC/Wan2.2-Lightning",
        num_inference_steps=4,
        guidance_scale=1.0,
        flow_shift=5.0,
        solver="euler",
    ),
    FewStep(
        name="LightX2V's Wan2.2 distillation",
        pattern=r"wan[-_ ]?2[-_.]?2\D.*lightx2v_(?:4steps?|moe_distill)",
        # infer_steps, enable_cfg false, sample_shift in configs/distill/wan22/wan_moe_*_distill_*lora.json;
        # Wan22StepDistillScheduler.step_post is an Euler step
        source="ModelTC/LightX2V",
        num_inference_steps=4,
        guidance_scale=1.0,
        flow_shift=5.0,
        solver="euler",
    ),
    FewStep(
        name="LightX2V's Wan2.1 distillation",
        pattern=r"lightx2v\w*_(?:4steps?|cfg_step_distill)|stepdistill-cfgdistill",
        # the same of configs/distill/wan21/wan_{t2v,i2v}_distill_lora_4step_cfg.json; its
        # WanStepDistillScheduler adds fresh noise after each step, so no solver is named here
        source="ModelTC/LightX2V",
        num_inference_steps=4,
        guidance_scale=1.0,
        flow_shift=5.0,
    ),
    FewStep(
        name="FastWan2.2-TI2V-5B",
        pattern=r"5b_fastwan|fastwan2[._]2-ti2v-5b",
        # dmd_denoising_steps of FastWan2_2_TI2V_5B_Config in fastvideo/configs/pipelines/wan.py; its
        # DmdDenoisingStage has no guidance, and took a shift of 8 where the config says 5
        source="hao-ai-lab/FastVideo",
        num_inference_steps=3,
        guidance_scale=1.0,
        remark=DMD_TIMESTEPS,
    ),
    FewStep(
        name="FastWan2.1-T2V",
        pattern=r"fastwan_t2v|fastwan2[._]1-t2v",
        # FastWan2_1_T2V_480P_Config, likewise; here both say 8
        source="hao-ai-lab/FastVideo",
        num_inference_steps=3,
        guidance_scale=1.0,
        flow_shift=8.0,
        remark=DMD_TIMESTEPS,
    ),
    FewStep(
        name="Wan2.2-TI2V-5B-Turbo",
        pattern=r"ti2v[-_]5b[-_]turbo",
        # its README: "in just 4 steps, eliminating the need for the CFG trick"
        source="quanhaol/Wan2.2-TI2V-5B-Turbo",
        num_inference_steps=4,
        guidance_scale=1.0,
    ),
    FewStep(
        name="CausVid",
        pattern=r"causvid",
        # enable_cfg false in configs/causvid/wan_{t2v,i2v}_causvid.json; no one number of steps is agreed on
        # for the LoRA, which Kijai took from a model of 9 steps
        source="ModelTC/LightX2V",
        guidance_scale=1.0,
    ),
)


def _kin(
    blocks: int, dim: int, channels: int, *models: str, expert_of: str | None = None, image: bool = False
) -> Kin:
    k_img = (dim,) if image else ()
    return Kin(
        models,
        (expert_of,) if expert_of else (),
        blocks,
        {
            "patch_embedding.weight": (dim, channels, -1, -1, -1),
            "blocks.0.cross_attn.k_img.bias": k_img,
            "vace_blocks.0.before_proj.bias": (),
        },
    )


def _vace(blocks: int, dim: int, model: str) -> Kin:
    return Kin(
        (model,),
        (),
        blocks,
        {
            "patch_embedding.weight": (dim, 16, -1, -1, -1),
            "blocks.0.cross_attn.k_img.bias": (),
            "vace_blocks.0.before_proj.bias": (dim,),
        },
    )


WAN = Family(
    name="wan",
    known_as=r"(?<![a-z])(?:fast)?wan(?![a-z])",
    canonical="native",
    layouts={"diffusers": Renames((diffusers, native) for native, diffusers in ROWS)},
    names=frozenset(split_leaf(row.name)[0] for kind in WAN_CLASSES for row in kind.rows),
    block="blocks.{n}.",
    # WanTransformer3DModel._keep_in_fp32_modules
    keep_float32=frozenset({"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}),
    experts={"transformer": "high_noise", "transformer_2": "low_noise"},
    skips=(IMAGE_BRANCH,),
    kin=(
        _kin(30, 1536, 16, "Wan2.1-T2V-1.3B"),
        _kin(40, 5120, 16, "Wan2.1-T2V-14B", expert_of="Wan2.2-T2V-A14B"),
        _kin(40, 5120, 36, "Wan2.1-I2V-14B", image=True),
        _kin(40, 5120, 36, expert_of="Wan2.2-I2V-A14B"),
        _kin(30, 3072, 48, "Wan2.2-TI2V-5B"),
        _vace(30, 1536, "Wan2.1-VACE-1.3B"),
        _vace(40, 5120, "Wan2.1-VACE-14B"),
    ),
    measures=MEASURES,
    branches=BRANCHES,
    classes=WAN_CLASSES,
    few_step=FEW_STEP,
    # boundary in wan/configs/wan_{t2v,i2v}_A14B.py of Wan-Video/Wan2.2; boundary_ratio in model_index.json
    boundary_ratios={"Wan2.2-T2V-A14B": 0.875, "Wan2.2-I2V-A14B": 0.9},
)
