"""Gemma 4: the text model, dense or with experts beside each MLP, and images and sound around it."""

from manyhands.families.family import Config, Experts, Family, Shapes
from manyhands.families.gemma2 import NORMS
from manyhands.families.hybrids import attention, mlp, norms


def _block(config: Config, index: int, dense: bool) -> Shapes:
    """Layers of full attention have other heads. The last ones may take keys and values from those before."""
    last, kinds = config["num_hidden_layers"] - 1, config.get("layer_types")
    is_full = index == last or (kinds[index] == "full_attention" if kinds else (index + 1) % 6 == 0)
    own = dict(config) | {"attention_bias": config.get("attention_bias", False)}
    dim = config.get("head_dim") or 256
    if is_full:
        dim = config.get("global_head_dim") or 512
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    if (layers := config.get("per_layer_config")) is not None:
        layer = layers.get(str(index)) or {}
        dim = layer.get("head_dim") or config.get("head_dim") or 256
        own["num_key_value_heads"] = layer.get("num_key_value_heads") or config.get("num_key_value_heads")
    shapes = attention(own, dim)
    shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in ("q", "k")}
    shares = index >= config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)
    if shares:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(("self_attn.k", "self_attn.v"))}
    elif is_full and config.get("attention_k_eq_v"):
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.v")}
    shapes |= mlp(
        config, config["intermediate_size"] * (1 + (shares and config.get("use_double_wide_mlp", False))), "mlp"
    )
    shapes |= norms(config, *NORMS)
    if width := config.get("hidden_size_per_layer_input", 256):
        hidden = config["hidden_size"]
        shapes |= {"per_layer_input_gate.weight": (width, hidden), "per_layer_projection.weight": (hidden, width)}
        shapes |= norms(config, "post_per_layer_input_norm")
    if not dense:
        more = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        shapes |= norms(config, *more) | {"router.scale": (config["hidden_size"],)}
        shapes["router.per_expert_scale"] = (config["num_experts"],)
    return shapes


GEMMA4_TEXT = Family(
    name="Gemma 4",
    model_types=("gemma4_text",),
    tied=True,
    head_dim=256,
    norms=NORMS,
    experts=Experts(parent="", router="router.proj.weight"),
    block=_block,
)
GEMMA4 = Family(
    name="Gemma 4",
    model_types=("gemma4",),
    towers=("model.vision_tower", "model.audio_tower"),
    projectors=("model.embed_vision", "model.embed_audio"),
)

FAMILIES = (GEMMA4_TEXT, GEMMA4)
