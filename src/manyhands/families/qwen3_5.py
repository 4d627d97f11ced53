"""Qwen3-Next and Qwen 3.5, dense and with experts: most layers are linear attention."""

from dataclasses import replace

from manyhands.families.family import DELTA_RULE, Config, Experts, Family, Shapes
from manyhands.families.hybrids import attention, delta_net, has_attention, mlp, norms
from manyhands.families.qwen2 import QWEN_IMAGES


def _block(config: Config, index: int, dense: bool) -> Shapes:
    if has_attention(config, index):
        dim = config.get("head_dim") or 256
        own: Shapes = {f"self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
        mixer = attention(config, dim, gates=True) | own
    else:
        mixer = delta_net(config, split=not str(config["model_type"]).startswith("qwen3_next"))
    feed = mlp(config, config["intermediate_size"], "mlp") if dense else {}
    return mixer | feed | norms(config, "input_layernorm", "post_attention_layernorm")


QWEN3_5_TEXT = Family(
    name="Qwen3.5",
    model_types=("qwen3_5_text",),
    head_dim=256,
    block=_block,
    packs=True,
    mixers=("Qwen3_5GatedDeltaNet",),
    packages=("fla",),
    kernels=DELTA_RULE,
)
QWEN3_NEXT = replace(
    QWEN3_5_TEXT,
    name="Qwen3-Next",
    model_types=("qwen3_next", "qwen3_5_moe_text"),
    mixers=("Qwen3NextGatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
    experts=Experts(
        shared="shared_expert", shared_inner="shared_expert_intermediate_size", shared_gate="shared_expert_gate"
    ),
)
QWEN3_5 = Family(
    name="Qwen3.5",
    model_types=("qwen3_5",),
    packs=True,
    text_model_type="qwen3_5_text",
    towers=("model.visual",),
    projectors=("model.visual.merger",),
    images=replace(QWEN_IMAGES, grid_inputs=("position_ids", "cu_seqlens", "interp_indices"), keeps_features=False),
)
QWEN3_5_MOE = replace(
    QWEN3_5, name="Qwen3.5-MoE", model_types=("qwen3_5_moe",), text_model_type="qwen3_5_moe_text", packs=None
)

FAMILIES = (QWEN3_5_TEXT, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
