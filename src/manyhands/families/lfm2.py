"""LFM2, dense and with experts: most layers are short convolutions."""

from dataclasses import replace

from manyhands.families.family import CONVOLUTION, Config, Experts, Family, Shapes
from manyhands.families.hybrids import attention, has_attention, mlp, norms


def _block(config: Config, index: int, dense: bool) -> Shapes:
    hidden = config["hidden_size"]
    dim = hidden // config["num_attention_heads"]
    mixer: Shapes
    if has_attention(config, index):
        own: Shapes = {f"self_attn.{name}.weight": (dim,) for name in ("q_layernorm", "k_layernorm")}
        mixer = attention(config, dim, out="out_proj") | own
    else:
        mixer = {"conv.conv.weight": (hidden, 1, config.get("conv_L_cache") or 3)}
        mixer |= {"conv.in_proj.weight": (3 * hidden, hidden), "conv.out_proj.weight": (hidden, hidden)}
        if config.get("conv_bias"):
            mixer |= {f"conv.{name}.bias": (hidden,) for name in ("conv", "out_proj")}
            mixer["conv.in_proj.bias"] = (3 * hidden,)
    feed = mlp(config, _inner(config), "feed_forward", ("w1", "w3", "w2")) if dense else {}
    return mixer | feed | norms(config, "operator_norm", "ffn_norm")


def _inner(config: Config) -> int:
    """Of the dense type two thirds of what config.json says, rounded up to a multiple."""
    inner: int = config["intermediate_size"]
    if config["model_type"] != "lfm2" or not config.get("block_auto_adjust_ff_dim", True):
        return inner
    multiple = config.get("block_multiple_of") or 256
    inner = int((config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * inner / 3))
    return multiple * -(-inner // multiple)


LFM2 = Family(
    name="LFM2",
    model_types=("lfm2",),
    tied=True,
    block=_block,
    packs=True,
    mixers=("Lfm2ShortConv",),
    packages=("causal_conv1d",),
    kernels=(CONVOLUTION,),
)
LFM2_MOE = replace(
    LFM2,
    name="LFM2 MoE",
    model_types=("lfm2_moe",),
    mixers=("Lfm2MoeShortConv",),
    experts=Experts("feed_forward"),
)

FAMILIES = (LFM2, LFM2_MOE)
