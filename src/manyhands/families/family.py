"""What a model family is made of, as data: what its config.json leaves out, which modules it has, whether it packs.

Fields that a published ``config.json`` omits have the default of the family's own configuration class, and some facts
are in no configuration at all: names of norms, biases that are always there, projections that are stored as one matrix.
A :class:`Family` holds them for every model type of the family that reads alike. Pure: imports neither torch nor
transformers, reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.core.terms import LossTerm
from manyhands.families.images import ImageEntry, ImageKind, ImageShape

Config = Mapping[str, Any]
"""The fields of a config.json; of a multimodal model those of its text."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of parameters by name, (out, in) for linear layers."""


@dataclass(frozen=True)
class KnownModule:
    """A module class whose forward pass manyhands knows line by line, so that a fused one may replace it.

    Attention: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, optional ``q_norm`` and ``k_norm`` of one head each or of
    all, and rotary embeddings. MLP: ``down_proj(activation(gate_proj(x)) * up_proj(x))``. The layers on one input may
    be merged into one, whose outputs stand in this order.
    """

    kind: Literal["attention", "mlp"]
    name: str
    package: str = "transformers.models."  # its module's name begins so: a class of the same name elsewhere is another
    activation_field: str = "hidden_act"  # of the configuration
    window_in_config: bool = False  # the attention module has no attribute ``sliding_window``, its configuration has
    # What the family says of its weights; ``known_modules()`` fills these in.
    norms_all_heads: bool = False  # queries and keys are normed before they are split into heads
    merged: str = ""  # the layer that holds q, k and v, or gate and up


Expand = Callable[[ImageShape, Mapping[str, Any]], str]
"""From an image's shape and the processor's values (``words``, ``fields``, those of the image processor)."""


@dataclass(frozen=True)
class ImageLayout:
    """How a family's images reach its model: their kind, what stands for them in the text, and what its tower needs."""

    kind: ImageKind
    expand: Expand  # what the processor writes in place of an image's placeholder
    words: Mapping[str, str]  # names of the tokens in it, as the tokenizer has them, and their usual spelling
    placeholder: str = "image_token"  # which of ``words`` chat templates write for an image
    token: str = "image_token"  # which of them stands where features go
    token_field: str = "image_token_id"  # its id in config.json
    fields: Mapping[str, Any] = field(default_factory=dict)  # of processor_config.json, and their defaults
    # what the processor hands to the image processor, by its own values
    arguments: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    mrope: bool = False  # positions of text have three axes: entry ``rope_positions`` (3, 1, T)
    grid_inputs: tuple[str, ...] = ()  # what the tower takes if it is given, and else finds by its grids, waiting
    reads_grids: bool = False  # the tower works with the grids themselves too, on the device
    # the tokens of an image attend to each other in both directions: always, never, or where this field of its text's
    # configuration is "vision"
    bidirectional: bool | str = False
    in_windows_alone: bool = False  # so in layers with a window, and not in others
    inferred: bool = False  # from the model's own files: its processor writes and cuts, and the loaded model is checked
    # the first module with weights in a projector that averages patches before: what goes in there is the smaller
    after_pooling: str = ""
    keeps_features: bool = True  # where features leave the tower was tried: they may be kept (``data.cache_features``)

    @property
    def entries(self) -> tuple[ImageEntry, ...]:
        return self.kind.entries

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    def attends_both_ways(self, config: Config) -> bool:
        """Whether tokens of an image do so in a model with this config.json."""
        if isinstance(self.bidirectional, bool):
            return self.bidirectional
        return (config.get("text_config") or config).get(self.bidirectional) == "vision"


def expand_by_its_own(image: ImageShape, processor: Mapping[str, Any]) -> str:
    """What the model's own processor has written for an image of this shape."""
    return str(processor["written"])


IMAGE_TOKEN_FIELDS = ("image_token_id", "image_token_index")  # of config.json


def infer_images(config: Config) -> ImageLayout | None:
    """How images reach a model of a family without a file: as squares of one size in place of one token, if a
    config.json has a vision part and says which token. Whether they do is asked of its processor and the loaded model.
    """
    named = [name for name in IMAGE_TOKEN_FIELDS if type(config.get(name)) is int]
    if not named or not isinstance(config.get("vision_config"), dict):
        return None
    words = {"placeholder": "", "token": ""}
    return ImageLayout(
        ImageKind(), expand_by_its_own, words, "placeholder", "token", token_field=named[0], inferred=True
    )


@dataclass(frozen=True)
class Experts:
    """Where a family's config.json describes its experts, and what its blocks call them."""

    parent: str = "mlp"  # the module of a block that holds experts and router; "": the block
    router: str = "gate.weight"  # (experts, hidden_size) within the parent
    inner: str = "moe_intermediate_size"  # of one expert
    shared: str = ""  # a module within the parent that every token passes through
    shared_inner: str = ""  # its inner size; "": that of one expert times ``num_shared``
    num_shared: str = "n_shared_experts"
    shared_gate: str = ""
    biases: bool = False  # experts and router have them
    gate: bool = True  # experts multiply two projections of what goes in; False: they have up_proj and down_proj alone
    transposed: bool = False  # files have (experts, in, out) whatever the sizes
    # class of experts that are (experts, in, out) with a forward pass of their own: the sigmoid of a token's largest
    # logits weighs what goes into an expert, not its result
    weighs_inputs: str = ""

    def within(self, name: str) -> str:
        """The name in a block of what the parent calls ``name``."""
        return f"{self.parent}.{name}" if self.parent else name

    @property
    def stacks(self) -> tuple[str, str]:
        """The names in a block of the stacks, in the order in which a token passes them."""
        first = "gate_up_proj" if self.gate else "up_proj"
        return self.within(f"experts.{first}"), self.within("experts.down_proj")


# Model types for which vLLM reads the factors of all experts of a block as one pair: its classes with
# ``is_3d_moe_weight``, and only where both stacks are adapted (vllm/lora/model_manager.py, read in November 2026).
VLLM_READS_STACKS = ("gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "glm4_moe_lite")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MIXERS_OF_EXPERTS = {"moe", "E"}  # blocks that have them in the place of a mixer
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def num_experts(config: Config) -> int:
    """Routed experts of a block; 0 for a dense model."""
    kind, number = config.get("model_type"), next((config[key] for key in NUM_EXPERTS if config.get(key)), 0)
    if (kind == "jamba" and number == 1) or not config.get("enable_moe_block", True):
        return 0
    if kind == "nemotron_h":  # its configuration counts experts of a kind of block that a model need not have
        blocks = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
        return number if MIXERS_OF_EXPERTS & set(blocks) else 0
    return number


def experts_per_token(config: Config) -> int:
    """Experts that each token goes to."""
    return next((config[key] for key in EXPERTS_PER_TOKEN if config.get(key)), 2)


@dataclass(frozen=True)
class MixerKernel:
    """A function of a package, which transformers' mixers call where it is installed, and its parameter that keeps the
    documents of a pack apart: filled from the mixer's ``argument``, it is dropped in silence by versions without it.
    """

    place: str  # module:function
    parameter: str
    argument: str


CONVOLUTION = MixerKernel("causal_conv1d:causal_conv1d_fn", "seq_idx", "seq_idx")
# With the convolution that these mixers run first: without its argument, a few tokens of the previous document leak.
DELTA_RULE = (
    MixerKernel("fla.ops.gated_delta_rule:chunk_gated_delta_rule", "cu_seqlens", "cu_seq_lens_q"),
    CONVOLUTION,
)
# its own cu_seqlens resets no state
MAMBA2 = (CONVOLUTION, MixerKernel("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined", "seq_idx", "seq_idx"))


@dataclass(frozen=True)
class Family:
    """A family of decoders, or of multimodal models around one. Defaults are Llama's.

    Names of modules and parameters are those of the family's implementation in transformers. A bias is there always
    (True), never (False), or where the configuration has this key set to true.
    """

    name: str  # as people call it
    model_types: tuple[str, ...]  # ``model_type`` of its config.json

    # where config.json says nothing
    tied: bool = False  # the head is the embeddings
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    attention_softcap: float | None = None
    sinks: bool = False  # heads have a learned score without a value
    flags: Mapping[str, bool] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)  # for the text part of a multimodal model

    # one block
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # each hidden_size wide
    norm_bias: bool = False
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # the last one leads back to hidden_size
    # norms of queries and keys: one for all heads (head_dim,), one for each (heads, head_dim), or over all at once
    # (heads * head_dim,)
    qk_norm: Literal["shared", "per head", "all heads"] | None = None
    qk_norm_key: str | None = None  # of the configuration; None: always
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # projections that are one matrix, in its order
    known_modules: tuple[KnownModule, ...] = ()

    experts: Experts | None = None  # None: its mixtures of experts, if any, cannot be trained
    latent_attention: bool = False  # queries, and keys with values, pass through a narrow layer each

    peft_targets: tuple[str, ...] = ()  # the modules that PEFT adapts if none are named; (): it has to be told

    mixers: tuple[str, ...] = ()  # classes of modules that carry a state along a row, apart from attention
    packages: tuple[str, ...] = ()  # with kernels for these, which transformers takes if they are installed
    kernels: tuple[MixerKernel, ...] = ()  # that together keep documents of a pack apart in these; (): none do
    peft_refuses: tuple[str, ...] = ()  # last names of layers that PEFT 0.21 does not adapt in these types
    bypassed: tuple[str, ...] = ()  # linear layers of a block whose weights are read, and which are never called
    block: Callable[[Config, int, bool], Shapes] | None = None  # its parameters but for experts; bool: it has none
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # prefixes of parameters in blocks, by their prefixes in files
    masks_by_position: bool = True  # transformers' own masks keep documents of a pack apart by their positions

    why_unpacked: str = ""  # why documents of a pack cannot be as if alone
    packs: bool | None = None  # measured: documents of a pack are as if alone; None: not measured

    # a multimodal model
    text_model_type: str | None = None  # of its text, where that cannot be another family's
    decoder: str = "model.language_model"  # the module with its embeddings, blocks and last norm
    towers: tuple[str, ...] = ()  # modules that encode images, video or sound
    projectors: tuple[str, ...] = ()  # modules that lead from a tower to the embeddings
    images: ImageLayout | None = None  # None: images cannot be trained

    terms: tuple[LossTerm, ...] = ()  # of the loss, beside those of the task

    @property
    def is_multimodal(self) -> bool:
        return bool(self.towers)


def is_tied(family: Family, config: Config) -> bool:
    """Whether the head is the embeddings."""
    tied = config.get("tie_word_embeddings")
    return family.tied if tied is None else bool(tied)


def config_of_block(config: Config, index: int) -> Config:
    """The fields of config.json with those that it has for the block ``index`` alone."""
    return {**config, **((config.get("per_layer_config") or {}).get(str(index)) or {})}


def head_dim(family: Family, config: Config) -> int:
    if family.latent_attention:
        return int(config["qk_rope_head_dim"] + config["qk_nope_head_dim"])
    return config.get("head_dim") or family.head_dim or config["hidden_size"] // config["num_attention_heads"]


def block_shapes(family: Family, config: Config, index: int = 0) -> Shapes:
    """Shapes of the parameters of the block ``index`` by their names in it; all are alike but for experts, which some
    of the blocks of a mixture have.
    """
    shapes: Shapes = {}
    experts = None if _is_dense(family, config, index) else family.experts
    if family.block is not None:
        shapes |= family.block(config, index, experts is None)
        linears = {} if experts is None else _experts(config, experts)
    else:
        linears = _linears(family, config, experts)
    for name, (out, into, bias) in linears.items():
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if experts is not None:
        shapes[experts.within(experts.router)] = (num_experts(config), config["hidden_size"])
        if experts.biases:
            shapes |= _expert_biases(config, experts)
    if family.block is not None:
        return shapes
    if family.sinks:
        shapes["self_attn.sinks"] = (num_heads(config)[0],)
    if family.latent_attention:
        shapes |= {
            f"self_attn.{kind}_a_layernorm.weight": (config[f"{kind}_lora_rank"],)
            for kind in ("q", "kv")
            if config.get(f"{kind}_lora_rank")
        }
    for name in family.norms:
        shapes |= norm_shapes(family, config, name)
    if family.qk_norm and (family.qk_norm_key is None or _flag(family, config, family.qk_norm_key)):
        dim, (heads, kv_heads) = head_dim(family, config), num_heads(config)
        for name, num in {"q_norm": heads, "k_norm": kv_heads}.items():
            shape = {"shared": (dim,), "per head": (num, dim), "all heads": (num * dim,)}[family.qk_norm]
            shapes[f"self_attn.{name}.weight"] = shape
    return shapes


def norm_shapes(family: Family, config: Config, name: str) -> Shapes:
    """Shapes of the parameters of a norm over hidden_size."""
    kinds = ("weight", "bias") if family.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config["hidden_size"],) for kind in kinds}


def num_heads(config: Config) -> tuple[int, int]:
    """Heads of the queries, and of keys and values."""
    heads = config["num_attention_heads"]
    return heads, config.get("num_key_value_heads") or heads


def expert_groups(family: Family, config: Config) -> dict[str, int]:
    """How many experts the stacks of a block hold, by name; {} for a dense model."""
    number = num_experts(config)
    if family.experts is None or not number:
        return {}
    return dict.fromkeys(family.experts.stacks, number)


ROUTER = re.compile(r"(?:gate|router|shared_expert_gate)(?:\.|$)")


def routes(name: str, size: int, experts: Mapping[str, int]) -> bool:
    """Whether a linear layer of ``size`` values beside experts gives one for each of them, or one for a shared one.

    ``experts``: how many there are in each module of experts, by its name.
    """
    parents = ((path.rpartition("experts")[0], number) for path, number in experts.items())
    return any(
        size in (1, number) and name.startswith(parent) and ROUTER.match(name, len(parent))
        for parent, number in parents
    )


def _is_dense(family: Family, config: Config, index: int) -> bool:
    """Whether the MLP of the block ``index`` is one, in place of experts."""
    if family.experts is None or not num_experts(config):
        return True
    kinds = config.get("mlp_layer_types")
    mixers = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
    if MIXERS_OF_EXPERTS & set(mixers):
        return mixers[index] not in MIXERS_OF_EXPERTS
    period, sparse = config.get("expert_layer_period") or 1, config.get("moe_layers")
    return (
        index < (config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0)
        or index in (config.get("mlp_only_layers") or ())
        or (index + 1) % (config.get("decoder_sparse_step") or 1) != 0
        or (period > 1 and index % period != config.get("expert_layer_offset", 0))
        or bool(kinds and kinds[index] == "dense")
        or (isinstance(sparse, list) and index not in sparse)
        or (sparse is None and (index + 1) % (config.get("interleave_moe_layer_step") or 1) != 0)
    )


def latent_linears(config: Config) -> dict[str, tuple[int, int, bool]]:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434)."""
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], bool(config.get("attention_bias"))
    rope, plain, value = (config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    kv_rank, q_rank, q_size = config["kv_lora_rank"], config.get("q_lora_rank"), heads * (rope + plain)
    queries = {"q_proj": (q_size, hidden, False)}
    if q_rank:
        queries = {"q_a_proj": (q_rank, hidden, bias), "q_b_proj": (q_size, q_rank, False)}
    linears = queries | {
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden, bias),
        "kv_b_proj": (heads * (plain + value), kv_rank, False),
        "o_proj": (hidden, heads * value, bias),
    }
    return {f"self_attn.{name}": linear for name, linear in linears.items()}


def _experts(config: Config, experts: Experts) -> dict[str, tuple[int, int, bool]]:
    hidden, inner, number = config["hidden_size"], config[experts.inner], num_experts(config)
    (first, last), width = experts.stacks, config.get("moe_latent_size") or hidden
    linears = {
        first: (number * (1 + experts.gate) * inner, width, False),
        last: (number * width, inner, False),
    }
    if experts.shared_inner:
        size = config.get(experts.shared_inner) or 0
    else:
        size = inner * (config.get(experts.num_shared) or 0) if experts.shared else 0
    if size:
        shared = experts.within(experts.shared)
        linears |= {f"{shared}.{name}": (size, hidden, False) for name in ("gate_proj", "up_proj")[not experts.gate :]}
        linears[f"{shared}.down_proj"] = (hidden, size, False)
    if experts.shared_gate:
        linears[experts.within(experts.shared_gate)] = (1, hidden, False)
    return linears


def _expert_biases(config: Config, experts: Experts) -> Shapes:
    number, (first, last) = num_experts(config), experts.stacks
    return {
        experts.within(f"{experts.router.removesuffix('weight')}bias"): (number,),
        f"{first}_bias": (number, 2 * config[experts.inner]),
        f"{last}_bias": (number, config["hidden_size"]),
    }


def _linears(family: Family, config: Config, experts: Experts | None = None) -> dict[str, tuple[int, int, bool]]:
    """(out, in, has a bias) of each linear layer of a block."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], head_dim(family, config)
    heads, kv_heads = num_heads(config)
    qkv_bias, output_bias, mlp_bias = (
        _flag(family, config, bias) for bias in (family.qkv_bias, family.output_bias, family.mlp_bias)
    )
    *first, last = family.mlp
    projections = ("q", heads), ("k", kv_heads), ("v", kv_heads)
    linears = {f"self_attn.{name}_proj": (num * dim, hidden, qkv_bias) for name, num in projections}
    linears["self_attn.o_proj"] = (hidden, heads * dim, output_bias)
    if family.latent_attention:
        linears = latent_linears(config)
    if experts is not None:
        return linears | _experts(config, experts)
    linears |= {f"mlp.{name}": (inner, hidden, mlp_bias) for name in first}
    linears[f"mlp.{last}"] = (hidden, inner, mlp_bias)
    for merged, names in family.merged.items():
        parts = [linears.pop(name) for name in names]
        linears[merged] = (sum(out for out, _, _ in parts), parts[0][1], parts[0][2])
    return linears


def _flag(family: Family, config: Config, key: bool | str) -> bool:
    """``key`` itself, or the truth of this field of the configuration."""
    if isinstance(key, bool):
        return key
    value = config.get(key)
    return family.flags.get(key, False) if value is None else bool(value)
