"""Dimensions from config.json and headers: right for each family, and clear about what is missing or broken."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from manyhands.core.errors import UserError
from manyhands.facts.model import parameter_shapes, read_model_facts
from manyhands.families import block_shapes, find, measured_types, num_experts
from tests.support.tiny import OF_FAMILY, write_tiny_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


def write_header(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2, "U8": 1}[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def write_config(folder: Path, **more: object) -> dict:
    config = SIZES | {"model_type": "llama"} | more
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny model, as headers and zeros."""
    config = write_config(tmp_path)
    shapes = block_shapes(find(config), config)
    tensors = {f"model.layers.{layer}.{name}": ("BF16", shape) for layer in range(3) for name, shape in shapes.items()}
    tensors |= {
        "model.embed_tokens.weight": ("BF16", (64, 32)),
        "lm_head.weight": ("BF16", (64, 32)),
        "model.norm.weight": ("BF16", (32,)),
    }
    write_header(tmp_path / "model.safetensors", tensors)
    return tmp_path


# Measured families, and what else their config.json may say.
HYBRIDS = [kind for kind in measured_types() if find(kind).mixers]
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{kind: (kind, {}) for kind in measured_types() if kind not in HYBRIDS},
    **{kind: (kind, OF_FAMILY[kind]) for kind in HYBRIDS if not num_experts({"model_type": kind} | OF_FAMILY[kind])},
    "llama, biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral, windows": ("mistral", {"sliding_window": 16}),
    "gemma3_text, windows": ("gemma3_text", {"head_dim": 16, "sliding_window": 8}),
    "qwen3, narrow heads": ("qwen3", {"head_dim": 16}),
    "cohere, norms of queries": ("cohere", {"use_qk_norm": True}),
    "glm4, unbiased": ("glm4", {"attention_bias": False}),
    "starcoder2, unbiased": ("starcoder2", {"use_bias": False}),
    "exaone4": ("exaone4", {}),
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_follow_from_a_config_that_says_no_more_than_it_must(name: str, tmp_path: Path):
    """Exactly what transformers saves, for every measured family; by name where files have the model's own names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, more = VARIANTS[name]
    config = AutoConfig.for_model(kind, **SIZES, **TOKENS, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    headers = read_model_facts(tmp_path, "tiny", "pretrained")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "dtype": "bfloat16"} | SIZES | more))
    formula = read_model_facts(tmp_path, "tiny", "random")
    others = ["sliding_window", "num_windowed_layers", *(["parameter_shapes"] if kind in HYBRIDS else [])]
    assert formula.model_copy(update={name: getattr(headers, name) for name in others}) == headers
    blocks = list(model.model.layers)
    assert headers.num_parameters == sum(p.numel() for p in model.parameters())
    assert headers.num_block_parameters == max(sum(p.numel() for p in block.parameters()) for block in blocks)
    assert headers.num_in_all_blocks == sum(p.numel() for p in model.model.layers.parameters())
    for index, block in enumerate(blocks):
        linears = {k: (m.out_features, m.in_features) for k, m in block.named_modules() if isinstance(m, nn.Linear)}
        linears = {k: size for k, size in linears.items() if k not in find(kind).bypassed}
        assert {name: shape[:2] for name, shape in headers.linears_of(index).items()} == linears
    attention = next(
        m for b in blocks for m in b.modules() if hasattr(m, "head_dim") and {"q_proj", "qkv_proj"} & {*m._modules}
    )
    assert headers.tied_embeddings == (model.lm_head.weight is model.get_input_embeddings().weight)
    assert headers.stored_dtype == "bfloat16"
    assert headers.head_dim == attention.head_dim
    normed = [linear for linear in ("q_proj", "k_proj") if hasattr(attention, linear.replace("proj", "norm"))]
    widths = {name: getattr(attention, name).out_features for name in normed}
    widths |= {"q_proj": attention.o_proj.in_features} if normed else {}  # without a gate for each query
    largest = max(blocks, key=lambda block: sum(p.numel() for p in block.parameters()))
    assert headers.head_norm_elements == (sum(widths.values()) if attention in largest.modules() else 0)


def test_a_familys_defaults_stand_in_for_keys_that_are_not_there():
    """Published Gemma 3 configurations do not say that embeddings are tied."""
    facts = {"model_type": "gemma3_text"} | SIZES
    q_norm, norms = 256, 4 * 32
    block = 4 * 256 * 32 * 2 + 2 * 256 * 32 * 2 + 3 * 48 * 32 + 2 * q_norm + norms
    assert sum(map(math.prod, parameter_shapes(facts).values())) == 3 * block + 64 * 32 + 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_multimodal_model_is_its_text_decoder(dtype: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from tests.support.multimodal import write_tiny_multimodal

    facts = read_model_facts(write_tiny_multimodal(tmp_path, dtype), "tiny", "pretrained")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = sum(p.numel() for p in model.model.language_model.parameters())
    assert (facts.model_type, facts.stored_dtype, facts.num_layers, facts.tied_embeddings) == (
        "gemma3_text",
        dtype,
        3,
        True,
    )
    assert set(facts.parameter_shapes) == {
        f"{facts.decoder}.{name}" for name, _ in model.model.language_model.named_parameters()
    }
    assert (
        facts.num_parameters == text and facts.num_tower_parameters == sum(p.numel() for p in model.parameters()) - text
    )
    assert facts.is_multimodal and read_model_facts(tmp_path, "tiny", "random").is_multimodal
    assert facts.num_block_parameters == sum(p.numel() for p in model.model.language_model.layers[0].parameters())
    assert (
        set(facts.block_linear_shapes) >= {"self_attn.q_proj", "mlp.down_proj"}
        and "mlp.fc1" not in facts.block_linear_shapes
    )


def test_what_a_published_gemma_3_leaves_out_is_transformers_default(tmp_path: Path):
    """google/gemma-3-4b-it says no more of its text than this."""
    from transformers import Gemma3TextConfig

    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    facts, default = read_model_facts(tmp_path, "gemma", "random"), Gemma3TextConfig()
    for name in ("vocab_size", "head_dim"):
        assert getattr(facts, name) == getattr(default, name)
    assert (facts.num_heads, facts.num_kv_heads) == (default.num_attention_heads, default.num_key_value_heads)
    assert facts.max_positions == default.max_position_embeddings and facts.tied_embeddings


def test_text_fields_beside_the_towers_are_the_texts(tmp_path: Path):
    """Qwen2.5-VL as it is published: no text_config, and names without it in the files."""
    from tests.support.multimodal import write_tiny_multimodal

    folder = write_tiny_multimodal(tmp_path, family="qwen2_5_vl")
    assert "text_config" not in json.loads((folder / "config.json").read_text())
    facts, formula = (read_model_facts(folder, "tiny", init) for init in ("pretrained", "random"))
    assert facts.model_type == "qwen2_5_vl_text" and facts.decoder == "model.language_model"
    assert facts.num_parameters == formula.num_parameters and facts.block_linear_shapes == formula.block_linear_shapes
    assert "model.language_model.layers.2.mlp.up_proj.weight" in facts.parameter_shapes


def test_the_widest_head_counts_and_the_widest_block(tmp_path: Path):
    """Gemma 4 (as saved, and as published) has wider heads in full attention, Gemma 3n a list of widths."""
    config = write_config(tmp_path, head_dim=16, per_layer_config={"2": {"head_dim": 24}})
    assert read_model_facts(tmp_path, "tiny", "random").head_dim == 24
    write_config(tmp_path, head_dim=16, global_head_dim=32)
    assert read_model_facts(tmp_path, "tiny", "random").head_dim == 32
    text = config | {"intermediate_size": [48, 96, 48], "per_layer_config": None}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": text}))
    assert read_model_facts(tmp_path, "tiny", "random").intermediate_size == 96
    (tmp_path / "config.json").write_text(json.dumps(text))  # the text alone is no multimodal model
    alone = read_model_facts(tmp_path, "tiny", "random")
    assert (alone.intermediate_size, alone.decoder) == (96, "model")


@pytest.mark.parametrize(("head", "tied"), [("none", True), ("the same", True), ("another", False)])
def test_files_say_whether_a_multimodal_models_head_is_its_embeddings(head: str, tied: bool, tmp_path: Path):
    """Configurations leave it out, and families' defaults differ from what was published."""
    from safetensors.numpy import load_file, save_file

    from tests.support.multimodal import write_tiny_multimodal

    folder = write_tiny_multimodal(tmp_path, family="mistral3")
    path, name = folder / "model.safetensors", "language_model.lm_head.weight"
    fields = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(path)
    if head == "none":
        del tensors[name]
    elif head == "the same":
        tensors[name] = tensors["language_model.model.embed_tokens.weight"].copy()
    save_file(tensors, path)
    facts = read_model_facts(folder, "tiny", "pretrained")
    assert facts.tied_embeddings is tied and ("lm_head.weight" in facts.parameter_shapes) is not tied


def test_sharded_weights(folder: Path):
    whole = read_model_facts(folder, "tiny", "pretrained")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    assert read_model_facts(folder, "tiny", "pretrained") == whole
    index.write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    with pytest.raises(UserError, match="1 of 2 weight files are missing") as caught:
        read_model_facts(folder, "tiny", "pretrained")
    assert caught.value.details == ("model-00002-of-00002.safetensors",)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(UserError, match="index of the model's weights"):
        read_model_facts(folder, "tiny", "pretrained")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": "zamba2"}, "zamba2 cannot be trained here.*share one attention"),
        ({"num_local_experts": 8}, "mixture of experts that cannot be trained here"),
        ({"num_experts": 64, "model_type": "zaya"}, "zaya is a mixture of experts.*not been tried"),
        ({"vision_config": {}, "model_type": "git"}, "git is multimodal, and its config.json does not say which part"),
        ({"text_config": {"model_type": "gemma3_text"}, "vision_config": {}}, "not a known kind of decoder"),
        ({"text_config": SIZES | {"num_local_experts": 8}, "model_type": "llama4"}, "llama4 is a mixture of experts"),
        ({"text_config": SIZES | {"cross_attention_layers": [3]}, "model_type": "mllama"},
         "mllama has blocks that attend to images only"),
        ({"quantization_config": {"bits": 4}}, r"quantized \(of an unnamed kind\), which is not supported"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"architectures": ["LlamaForSequenceClassification"]},
         "its head is for SequenceClassification and predicts no tokens"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"},
         "BertForMaskedLM is not a causal language model.*it is an encoder"),
        ({"hidden_size": None}, "not a known kind of decoder"),
        ({"vocab_size": "many"}, "vocab_size: .many. is not a positive integer"),
    ],
)  # fmt: skip
def test_models_that_are_not_supported(more: dict, words: str, tmp_path: Path):
    write_config(tmp_path, **more)
    with pytest.raises(UserError, match=f"(?s){words}") as caught:
        read_model_facts(tmp_path, "tiny", "random")
    assert caught.value.where.endswith("config.json")


def test_window_layers_are_dense_attention(tmp_path: Path):
    write_config(tmp_path, layer_types=["sliding_attention", "full_attention", "full_attention"], num_experts=0)
    assert read_model_facts(tmp_path, "tiny", "random").num_layers == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": ["llama"]}, "model_type: \"['llama']\" is not a string"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: '1000000000' is not an integer from 1 to 10,000"),
        ({"num_hidden_layers": True}, "num_hidden_layers: 'True'"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"hidden_size": 2.5, "head_dim": "x", "num_key_value_heads": -1}, "num_key_value_heads"),
        ({"num_attention_heads": 3}, "3 is not a multiple of num_key_value_heads: 2"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"sliding_window": {}}, "sliding_window"),
        ({"attn_logit_softcapping": "x"}, "attn_logit_softcapping: 'x' is not a number"),
        ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings: 'maybe' is not true or false"),
        ({"layer_types": 3}, "layer_types: '3' is not a list of strings"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"text_config": 3}, "text_config: '3' is not a mapping"),
        (
            {"vision_config": {}, "text_config": {"model_type": "llama", "num_hidden_layers": "3"}},
            "num_hidden_layers: '3'",
        ),
        (
            {"vision_config": {}, "text_config": {"model_type": "llama", "intermediate_size": [3, "x"]}},
            "intermediate_size",
        ),
    ],
)
def test_values_of_the_wrong_kind_are_named(more: dict, words: str, tmp_path: Path):
    write_config(tmp_path, **more)
    with pytest.raises(UserError, match=r"wrong kind|no model can have") as caught:
        read_model_facts(tmp_path, "m", "random")
    assert words in str(caught.value) and caught.value.where.endswith("config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[]", "not an object"),
        ('{"a": 1, // one\n}', "line 1, column 10: JSON has no comments, and // begins one"),
        ('{"a": 1,\n}', "there is a comma before }"),
        ("{'a': 1}", "double quotes"),
        ('{"a": True}', "JSON writes true, false and null, not True"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_config_that_is_no_json_says_why(text: str | bytes, words: str, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"config.json is broken") as caught:
        read_model_facts(tmp_path, "m", "random")
    assert words in caught.value.why


def _entry(**more: object) -> dict:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | more


@pytest.mark.parametrize(
    "entries",
    [
        {"a": _entry(dtype=["F32"])},
        {"a": _entry(shape=["2", "3"])},
        {"a": _entry(shape=[-2, -3])},
        {"a": _entry(shape=[True, 6])},
        {"a": _entry(data_offsets=[0])},
        {"a": _entry(data_offsets="024")},
        {"a": _entry(dtype="F64")},
        {"a": _entry(), "b": _entry()},
        {"a": [1]},
        ["a"],
    ],
)
def test_headers_of_the_wrong_kind(entries: object, folder: Path):
    text = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    with pytest.raises(UserError, match="weights file is broken") as caught:
        read_model_facts(folder, "m", "pretrained")
    assert re.search("invalid (JSON in header|shape, data type, or offset|offset)", caught.value.why), caught.value.why


@pytest.mark.parametrize(
    "index",
    [
        "[" * 100_000,
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "\\u0000"}}',
        json.dumps({"weight_map": {"a": "x" * 5000}}),  # longer than a file's name may be
    ],
)
def test_an_index_of_the_wrong_kind(index: str, folder: Path):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="index of the model's weights cannot be read"):
        read_model_facts(folder, "m", "pretrained")


def test_no_config(tmp_path: Path):
    with pytest.raises(UserError) as caught:
        read_model_facts(tmp_path, "tiny", "random")
    assert "no config.json" in caught.value.why
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        read_model_facts(tmp_path, "tiny", "random")
    assert "adapter" in caught.value.why
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is broken"):
        read_model_facts(tmp_path, "tiny", "random")


def test_a_folder_without_weights_names_what_was_looked_for(tmp_path: Path):
    write_config(tmp_path)
    with pytest.raises(UserError, match="no weights") as caught:
        read_model_facts(tmp_path, "tiny", "pretrained")
    assert "model.safetensors" in caught.value.why and "config.json" in caught.value.why
    assert "model.init=random" in caught.value.fix
    assert read_model_facts(tmp_path, "tiny", "random").num_parameters > 0


def test_pickles_are_refused(tmp_path: Path):
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UserError, match="pickles, which are not opened") as caught:
        read_model_facts(tmp_path, "tiny", "pretrained")
    assert "pytorch_model.bin" in caught.value.where


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header too small"),
        (b"\xff" * 64, "header too large"),
        (struct.pack("<Q", 4) + b"{no}", "invalid JSON in header"),
        (struct.pack("<Q", 10) + b'{"a": {}} ', "missing field `dtype`"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs pointer"),
    ],
)
def test_broken_headers(content: bytes, words: str, tmp_path: Path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="weights file is broken") as caught:
        read_model_facts(tmp_path, "tiny", "pretrained")
    assert words in caught.value.why
    assert caught.value.where.endswith("model.safetensors")


def test_a_download_that_was_cut_short(folder: Path):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError) as caught:
        read_model_facts(folder, "tiny", "pretrained")
    assert "file not fully covered" in caught.value.why


def test_quantised_weights(tmp_path: Path):
    write_config(tmp_path)
    write_header(tmp_path / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": ("U8", (48, 16))})
    with pytest.raises(UserError, match="stored as U8"):
        read_model_facts(tmp_path, "tiny", "pretrained")


def test_names_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    """Of a file that was saved without the head's prefix, and with frequencies that nothing loads."""
    folder = Path(write_tiny_model(tmp_path / "model"))
    known = read_model_facts(folder, "tiny", "pretrained").parameter_shapes
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    assert read_model_facts(folder, "tiny", "pretrained").parameter_shapes == known
