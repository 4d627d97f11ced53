"""What a model family is made of, as data: what its config.json leaves out, which modules it has, whether it packs.

Fields that a published ``config.json`` omits have the default of the family's own configuration class, and some facts
are in no configuration at all: names of norms, biases that are always there, projections that are stored as one matrix.
A :class:`Family` holds them for every model type of the family that reads alike. Pure: imports neither torch nor
transformers, reads no file.
"""

from __future__ import annotations

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
    bidirectional: bool = False  # the tokens of an image attend to each other in both directions
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

    peft_targets: tuple[str, ...] = ()  # the modules that PEFT adapts if none are named; (): it has to be told

    # packing
    packs: bool | None = None  # measured: documents of a pack are as if alone, or not; None: not measured
    packing_reason: str = ""  # why not

    # a multimodal model
    text_model_type: str | None = None  # of its text, where that cannot be another family's
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


def head_dim(family: Family, config: Config) -> int:
    return config.get("head_dim") or family.head_dim or config["hidden_size"] // config["num_attention_heads"]


def block_shapes(family: Family, config: Config) -> Shapes:
    """Shapes of the parameters of one block by their names in it, all blocks being alike."""
    shapes: Shapes = {}
    for name, (out, into, bias) in _linears(family, config).items():
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)
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


def _linears(family: Family, config: Config) -> dict[str, tuple[int, int, bool]]:
    """(out, in, has a bias) of each linear layer of a block."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], head_dim(family, config)
    heads, kv_heads = num_heads(config)
    qkv_bias, output_bias, mlp_bias = (
        _flag(family, config, bias) for bias in (family.qkv_bias, family.output_bias, family.mlp_bias)
    )
    *first, last = family.mlp
    linears = {f"self_attn.{name}_proj": (num * dim, hidden, qkv_bias) for name, num in _heads_of(heads, kv_heads)}
    linears["self_attn.o_proj"] = (hidden, heads * dim, output_bias)
    linears |= {f"mlp.{name}": (inner, hidden, mlp_bias) for name in first}
    linears[f"mlp.{last}"] = (hidden, inner, mlp_bias)
    for merged, names in family.merged.items():
        parts = [linears.pop(name) for name in names]
        linears[merged] = (sum(out for out, _, _ in parts), parts[0][1], parts[0][2])
    return linears


def _heads_of(heads: int, kv_heads: int) -> tuple[tuple[str, int], ...]:
    return ("q", heads), ("k", kv_heads), ("v", kv_heads)


def _flag(family: Family, config: Config, key: bool | str) -> bool:
    """``key`` itself, or the truth of this field of the configuration."""
    if isinstance(key, bool):
        return key
    value = config.get(key)
    return family.flags.get(key, False) if value is None else bool(value)
