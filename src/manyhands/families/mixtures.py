"""Mixtures of experts without a dense family of their own here: where each has its experts, and whose block it is."""

from dataclasses import replace

from manyhands.families.family import Experts, Family, KnownModule

OLMOE = Family(
    name="OLMoE",
    model_types=("olmoe",),
    mlp_bias=False,
    qk_norm="all heads",
    experts=Experts(inner="intermediate_size"),
)
FLEX_OLMO = replace(
    OLMOE,
    name="FlexOlmo",
    model_types=("flex_olmo",),
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
MIXTRAL = Family(
    name="Mixtral",
    model_types=("mixtral",),
    qkv_bias=False,
    output_bias=False,
    known_modules=(KnownModule("attention", "MixtralAttention", window_in_config=True),),
    peft_targets=("q_proj", "v_proj"),
    experts=Experts(inner="intermediate_size"),
)
DEEPSEEK_V3 = Family(
    name="DeepSeek-V3",
    model_types=("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "axk1", "mistral4"),
    latent_attention=True,
    mlp_bias=False,
    experts=Experts(shared="shared_experts"),
)
GLM4_MOE = Family(
    name="GLM-4.5",
    model_types=("glm4_moe",),
    output_bias=False,
    mlp_bias=False,
    qk_norm="shared",
    qk_norm_key="use_qk_norm",
    experts=Experts(shared="shared_experts"),
)
DOTS1 = replace(GLM4_MOE, name="dots.llm1", model_types=("dots1", "exaone_moe"), qk_norm_key=None)
SOLAR = replace(DOTS1, name="Solar Open", model_types=("solar_open",), head_dim=128)
GRANITE_MOE = Family(
    name="Granite MoE",
    model_types=("granitemoe", "granitemoeshared"),
    experts=Experts("block_sparse_moe", router="router.layer.weight", inner="intermediate_size"),
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE,
    name="Granite MoE with windows",
    model_types=("granitemoe_swa",),
    sinks=True,
    experts=Experts("block_sparse_moe", router="router.weight", inner="intermediate_size"),
)
MIMO_V2 = Family(name="MiMo-V2", model_types=("mimo_v2_flash",), head_dim=192, sinks=True, experts=Experts())
HUNYUAN = Family(name="Hunyuan MoE", model_types=("hunyuan_v1_moe", "afmoe", "phimoe"), experts=Experts())
COHERE2_MOE = replace(HUNYUAN, name="Cohere 2 MoE", model_types=("cohere2_moe", "ernie4_5_moe"), tied=True)
MELLUM = replace(HUNYUAN, name="Mellum", model_types=("mellum", "minimax_m2", "hy_v3", "laguna"), head_dim=128)
"""These are read from the headers of their weights; without weights, as Llama's blocks with experts."""

FAMILIES = (
    *(OLMOE, FLEX_OLMO, MIXTRAL, DEEPSEEK_V3, GLM4_MOE, DOTS1, SOLAR, GRANITE_MOE),
    *(GRANITE_MOE_SWA, MIMO_V2, HUNYUAN, COHERE2_MOE, MELLUM),
)
