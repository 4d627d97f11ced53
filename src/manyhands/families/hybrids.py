"""Hybrids: blocks with linear attention, a state space model or a short convolution in place of attention or beside it.

config.json names the kind of each block under many keys. Functions give the shapes of a block but for its experts.
"""

from __future__ import annotations

from manyhands.families.family import DELTA_RULE, MAMBA2, Config, Experts, Family, Shapes, latent_linears, num_heads

BESIDE_EXPERTS = "shared_mlp"


def has_attention(config: Config, index: int) -> bool:
    """Whether the block ``index`` of a hybrid has attention."""
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return kinds[index] in ("attention", "full_attention", "sliding_attention")
    if pattern := config.get("hybrid_override_pattern"):
        return bool(pattern[index] == "*")
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if config.get(key) is not None:
            return index in config[key]
    if own := config.get("linear_attn_config"):
        return index + 1 in own["full_attn_layers"]
    if "attn_layer_period" in config:
        return bool(index % config["attn_layer_period"] == config["attn_layer_offset"])
    return (index + 1) % (config.get("full_attention_interval") or 4) == 0


def attention(config: Config, dim: int, *, gates: bool = False, out: str = "o_proj") -> Shapes:
    """Projections of attention; ``gates``: queries come with a gate for each."""
    hidden, (heads, kv_heads) = config["hidden_size"], num_heads(config)
    sizes = {"q_proj": heads * dim * (1 + gates), "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    shapes: Shapes = {f"self_attn.{name}.weight": (size, hidden) for name, size in sizes.items()}
    shapes[f"self_attn.{out}.weight"] = (hidden, heads * dim)
    if config.get("attention_bias"):
        shapes |= {name.replace("weight", "bias"): (shape[0],) for name, shape in shapes.items()}
    return shapes


def mlp(
    config: Config, inner: int, parent: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    """A dense MLP, its last layer back to hidden_size."""
    *first, last = names
    shapes: Shapes = {f"{parent}.{name}.weight": (inner, config["hidden_size"]) for name in first}
    shapes[f"{parent}.{last}.weight"] = (config["hidden_size"], inner)
    if config.get("mlp_bias"):
        shapes |= {name.replace("weight", "bias"): (shape[0],) for name, shape in shapes.items()}
    return shapes


def norms(config: Config, *names: str) -> Shapes:
    return {f"{name}.weight": (config["hidden_size"],) for name in names}


def delta_net(config: Config, split: bool) -> Shapes:
    """A gated delta net (https://arxiv.org/abs/2412.06464); ``split``: its projections are four, not two."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    dim = config["linear_value_head_dim"]
    values, width = heads * dim, 2 * keys + heads * dim
    sizes = {"in_proj_qkvz": width + values, "in_proj_ba": 2 * heads}
    if split:
        sizes = {"in_proj_qkv": width, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    shapes: Shapes = {f"{name}.weight": (size, hidden) for name, size in sizes.items()}
    shapes |= {"dt_bias": (heads,), "A_log": (heads,), "norm.weight": (dim,), "out_proj.weight": (hidden, values)}
    shapes["conv1d.weight"] = (width, 1, config.get("linear_conv_kernel_dim") or 4)
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def olmo_delta_net(config: Config) -> Shapes:
    """The same with a projection each, and a convolution each of queries, keys and values."""
    hidden, heads = config["hidden_size"], config.get("linear_num_value_heads") or config["num_attention_heads"]
    key_heads = config.get("linear_num_key_heads") or config["num_attention_heads"]
    dim = config["linear_value_head_dim"]
    keys, values, width = (
        key_heads * config["linear_key_head_dim"],
        heads * dim,
        config.get("linear_conv_kernel_dim", 4),
    )
    sizes = {"q": keys, "k": keys, "v": values, "a": heads, "b": heads, "g": values}
    shapes: Shapes = {f"{name}_proj.weight": (size, hidden) for name, size in sizes.items()}
    shapes |= {"A_log": (heads,), "dt_bias": (heads,), "o_norm.weight": (dim,), "o_proj.weight": (hidden, values)}
    shapes["conv1d.weight"] = (2 * keys + values, 1, width)
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def mamba2(
    config: Config,
    inner: int,
    heads: int,
    groups: int,
    state: int,
    kernel: int,
    *,
    conv_bias: bool,
    parent: str = "mamba",
    norm: bool = True,
) -> Shapes:
    """Mamba-2 (https://arxiv.org/abs/2405.21060)."""
    hidden, width = config["hidden_size"], inner + 2 * groups * state
    shapes: Shapes = dict.fromkeys(("dt_bias", "A_log", "D"), (heads,))
    shapes |= {"conv1d.weight": (width, 1, kernel)} | ({"conv1d.bias": (width,)} if conv_bias else {})
    shapes |= {"in_proj.weight": (inner + width + heads, hidden), "out_proj.weight": (hidden, inner)}
    if config.get("mamba_proj_bias") or config.get("projectors_bias"):
        shapes |= {"in_proj.bias": (inner + width + heads,), "out_proj.bias": (hidden,)}
    if norm:
        shapes["norm.weight"] = (inner,)
    return {f"{parent}.{name}": shape for name, shape in shapes.items()}


def _mamba2_of(config: Config, inner: int | None = None, *, norm: bool = True) -> Shapes:
    return mamba2(
        config,
        inner or int((config.get("mamba_expand") or 2) * config["hidden_size"]),
        config["mamba_n_heads"],
        config["mamba_n_groups"],
        config["mamba_d_state"],
        config.get("mamba_d_conv") or 4,
        conv_bias=config.get("mamba_conv_bias", True),
        norm=norm,
    )


def _plain_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _olmo(config: Config, index: int, dense: bool) -> Shapes:
    feed = mlp(config, config["intermediate_size"], "mlp")
    if not has_attention(config, index):
        return olmo_delta_net(config) | feed | norms(config, "input_layernorm", "post_attention_layernorm")
    dim, (heads, kv_heads) = _plain_dim(config), num_heads(config)
    own: Shapes = {"self_attn.q_norm.weight": (heads * dim,), "self_attn.k_norm.weight": (kv_heads * dim,)}
    outer = norms(config, "post_attention_layernorm", "post_feedforward_layernorm")
    return attention(config, dim) | own | feed | outer


def _bamba(config: Config, index: int, dense: bool) -> Shapes:
    mixer = attention(config, _plain_dim(config)) if has_attention(config, index) else _mamba2_of(config)
    feed = mlp(config, config["intermediate_size"], "feed_forward")
    return mixer | feed | norms(config, "input_layernorm", "pre_ff_layernorm")


def _falcon(config: Config, index: int, dense: bool) -> Shapes:
    mixer = _mamba2_of(config, config.get("mamba_d_ssm"), norm=bool(config.get("mamba_rms_norm")))
    feed = mlp(config, config["intermediate_size"], "feed_forward")
    return attention(config, _plain_dim(config)) | mixer | feed | norms(config, "input_layernorm", "pre_ff_layernorm")


def _granite(config: Config, index: int, dense: bool) -> Shapes:
    mixer = attention(config, _plain_dim(config)) if has_attention(config, index) else _mamba2_of(config)
    hidden, inner = config["hidden_size"], config.get("shared_intermediate_size") or config["intermediate_size"]
    shared: Shapes = {
        f"{BESIDE_EXPERTS}.input_linear.weight": (2 * inner, hidden),
        f"{BESIDE_EXPERTS}.output_linear.weight": (hidden, inner),
    }
    return mixer | shared | norms(config, "input_layernorm", "post_attention_layernorm")


def _nemotron(config: Config, index: int, dense: bool) -> Shapes:
    """One mixer a block: attention, Mamba-2, or an MLP or experts without a gate."""
    kinds, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    mixer: Shapes
    if not dense:
        hidden, latent = config["hidden_size"], config.get("moe_latent_size")
        sizes = {"fc1": (latent, hidden), "fc2": (hidden, latent)} if latent else {}
        mixer = {f"mixer.{name}_latent_proj.weight": size for name, size in sizes.items()}
    elif has_attention(config, index):
        mixer = attention(config, config.get("head_dim") or 128)
        mixer = {name.replace("self_attn", "mixer"): shape for name, shape in mixer.items()}
    elif kinds[index] == "mlp" if kinds else pattern is not None and pattern[index] == "-":
        mixer = mlp(config, config["intermediate_size"], "mixer", ("up_proj", "down_proj"))
    else:
        heads = config["mamba_num_heads"]
        state, kernel, bias = (
            config["ssm_state_size"],
            config.get("conv_kernel") or 4,
            config.get("use_conv_bias", True),
        )
        inner = heads * config["mamba_head_dim"]
        mixer = mamba2(config, inner, heads, config["n_groups"], state, kernel, conv_bias=bias, parent="mixer")
    return mixer | norms(config, "norm")


def _jamba(config: Config, index: int, dense: bool) -> Shapes:
    """Mamba-1 (https://arxiv.org/abs/2312.00752) with norms."""
    hidden = config["hidden_size"]
    mixer = attention(config, _plain_dim(config))
    if not has_attention(config, index):
        inner, state = (config.get("mamba_expand") or 2) * hidden, config["mamba_d_state"]
        rank = config.get("mamba_dt_rank")
        rank = rank if isinstance(rank, int) else -(-hidden // 16)
        shapes: Shapes = {"A_log": (inner, state), "D": (inner,), "dt_proj.bias": (inner,), "conv1d.bias": (inner,)}
        shapes |= {"conv1d.weight": (inner, 1, config.get("mamba_d_conv") or 4), "in_proj.weight": (2 * inner, hidden)}
        shapes |= {"x_proj.weight": (rank + 2 * state, inner), "dt_proj.weight": (inner, rank)}
        shapes |= {"out_proj.weight": (hidden, inner), "dt_layernorm.weight": (rank,)}
        shapes |= {f"{name}_layernorm.weight": (state,) for name in ("b", "c")}
        mixer = {f"mamba.{name}": shape for name, shape in shapes.items()}
    feed = mlp(config, config["intermediate_size"], "feed_forward") if dense else {}
    return mixer | feed | norms(config, "input_layernorm", "pre_ff_layernorm")


def _kimi(config: Config, index: int, dense: bool) -> Shapes:
    """Kimi delta attention, whose decay is one for each channel (https://arxiv.org/abs/2510.26692), or latent
    attention.
    """
    shapes: Shapes
    if has_attention(config, index):
        shapes = {f"{name}.weight": (out, into) for name, (out, into, _) in latent_linears(config).items()}
        ranks = {f"{kind}_a_layernorm": config.get(f"{kind}_lora_rank") for kind in ("q", "kv")}
        shapes |= {f"self_attn.{name}.weight": (rank,) for name, rank in ranks.items() if rank}
    else:
        own, hidden = config.get("linear_attn_config") or {}, config["hidden_size"]
        dim = own.get("head_dim") or config.get("linear_head_dim") or 128
        heads = own.get("num_heads") or config.get("linear_num_heads") or 32
        width = own.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim") or 4
        values = heads * dim
        sizes = dict.fromkeys(("q", "k", "v"), values) | {"b": heads, "g_a": dim, "forget_gate.f_a": dim}
        own_shapes: Shapes = {f"{name}_proj.weight": (size, hidden) for name, size in sizes.items()}
        own_shapes |= {f"{name}_proj.weight": (values, dim) for name in ("g_b", "forget_gate.f_b")}
        own_shapes |= {"forget_gate.dt_bias": (values,), "forget_gate.A_log": (1, 1, heads, 1)}
        own_shapes |= {
            "conv1d.weight": (3 * values, 1, width),
            "o_norm.weight": (dim,),
            "o_proj.weight": (hidden, values),
        }
        shapes = {f"self_attn.{name}": shape for name, shape in own_shapes.items()}
    feed = mlp(config, config["intermediate_size"], "mlp") if dense else {}
    return shapes | feed | norms(config, "input_layernorm", "post_attention_layernorm")


def _minimax(config: Config, index: int, dense: bool) -> Shapes:
    """Lightning attention (https://arxiv.org/abs/2501.08313), or softmax attention."""
    dim, hidden = _plain_dim(config), config["hidden_size"]
    mixer = attention(config, dim)
    if not has_attention(config, index):
        width = config["num_attention_heads"] * dim
        mixer = {"qkv_proj.weight": (3 * width, hidden), "output_gate.weight": (width, hidden)}
        mixer |= {"out_proj.weight": (hidden, width), "norm.weight": (width,)}
        mixer = {f"self_attn.{name}": shape for name, shape in mixer.items()}
    return mixer | norms(config, "input_layernorm", "post_attention_layernorm")


_MAMBA = ("mamba_ssm", "causal_conv1d")

OLMO_HYBRID = Family(
    name="OLMo Hybrid",
    model_types=("olmo_hybrid",),
    block=_olmo,
    packs=True,
    mixers=("OlmoHybridGatedDeltaNet",),
    packages=("fla",),
    kernels=DELTA_RULE,
)
BAMBA = Family(
    name="Bamba",
    model_types=("bamba",),
    block=_bamba,
    packs=True,
    mixers=("BambaMixer",),
    packages=_MAMBA,
    kernels=MAMBA2,
)
GRANITE_HYBRID = Family(
    name="Granite 4",
    model_types=("granitemoehybrid",),
    block=_granite,
    experts=Experts("block_sparse_moe", router="router.weight", inner="intermediate_size"),
    masks_by_position=False,
    packs=True,
    mixers=("GraniteMoeHybridMambaLayer",),
    packages=_MAMBA,
    kernels=MAMBA2,
)
FALCON_H1 = Family(
    name="Falcon-H1",
    model_types=("falcon_h1",),
    block=_falcon,
    peft_refuses=("out_proj",),
    packs=True,
    mixers=("FalconH1Mixer",),
    packages=_MAMBA,
    kernels=MAMBA2,
)
NEMOTRON_H = Family(
    name="Nemotron-H",
    model_types=("nemotron_h",),
    head_dim=128,
    block=_nemotron,
    experts=Experts("mixer", shared="shared_experts", shared_inner="moe_shared_expert_intermediate_size", gate=False),
    peft_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    peft_refuses=("out_proj",),
    packs=True,
    mixers=("NemotronHMamba2Mixer",),
    packages=_MAMBA,
    kernels=MAMBA2,
)
JAMBA = Family(
    name="Jamba",
    model_types=("jamba",),
    block=_jamba,
    experts=Experts("feed_forward", router="router.weight", inner="intermediate_size"),
    packs=True,
    mixers=("JambaMambaMixer",),
    packages=_MAMBA,
    bypassed=("mamba.dt_proj",),
)
KIMI_LINEAR = Family(
    name="Kimi Linear",
    model_types=("kimi_linear",),
    latent_attention=True,
    block=_kimi,
    experts=Experts(shared="shared_experts", num_shared="num_shared_experts"),
    packs=True,
    mixers=("KimiLinearDeltaAttention",),
    packages=("fla", "causal_conv1d"),
    renamed={
        f"self_attn.{name}": f"self_attn.forget_gate.{name}" for name in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
    },
)
MINIMAX = Family(
    name="MiniMax-01",
    model_types=("minimax",),
    block=_minimax,
    experts=Experts(inner="intermediate_size"),
    packs=True,
    mixers=("MiniMaxLightningAttention",),
)
FAMILIES = (OLMO_HYBRID, BAMBA, GRANITE_HYBRID, FALCON_H1, NEMOTRON_H, JAMBA, KIMI_LINEAR, MINIMAX)
