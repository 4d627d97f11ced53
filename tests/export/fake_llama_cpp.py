"""What llama.cpp's convert_hf_to_gguf.py does with a tiny Llama, by gguf's writer: for machines without llama.cpp.

``python fake_llama_cpp.py MODEL --outfile FILE --outtype TYPE``. ``faults`` name what it gets wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


def convert(model: Path, target: Path, kind: str, faults: Collection[str] = ()) -> None:
    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_file_type(LlamaFileType[TYPES[kind]])
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template((model / "chat_template.jinja").read_text())
    for name, values in load_file(model / "model.safetensors").items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads:
            values = np.concatenate([turn(head) for head in np.split(values, config[heads])])
        renamed = rename(name)
        if "missing" in faults and renamed == "blk.1.ffn_up.weight":
            continue
        add(writer, renamed, values, kind)
    if "extra" in faults:
        add(writer, "blk.0.attn_sinks.weight", np.ones(4, np.float32), "f32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def turn(head: np.ndarray) -> np.ndarray:
    """Rows 0, n/2, 1, n/2 + 1, ... of the n of one head: the pairs that llama.cpp rotates stand side by side."""
    half = len(head) // 2
    return head[[row for pair in range(half) for row in (pair, pair + half)]]


def rename(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def add(writer: GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    if kind == "f32" or values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
    elif kind == "f16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        raw = GGMLQuantizationType[kind.upper()]
        writer.add_tensor(name, quants.quantize(values.astype(np.float32), raw), raw_dtype=raw)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path, required=True)
    parser.add_argument("--outtype", required=True)
    arguments = parser.parse_args()
    if json.loads((arguments.model / "config.json").read_text()).get("unknown"):
        sys.exit("Model TinyForCausalLM is not supported")
    convert(arguments.model, arguments.outfile, arguments.outtype)
