"""The same work by TRL with Liger kernels: random weights of the same shape, full rows, all tokens trained. Prints one JSON line.

    torchrun --nproc_per_node=1 -m manyhands.bench.peer --row 8b-lora --output rows.jsonl

Follows TRL's own recommendations for speed: Liger kernels, fused AdamW, bfloat16, no padding. Needs trl, peft and liger-kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from manyhands.bench.rows import BY_NAME, Row, mix_lengths
from manyhands.bench.shapes import NUM_WORDS, SHAPES, flops_per_token

BLOCKS = {"llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer", "gemma3_text": "Gemma3DecoderLayer"}
STD = 0.02


def build_model(row: Row, device: torch.device) -> Any:
    """A bfloat16 model with random weights; for qlora its linear layers are made in NF4 one by one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = SHAPES[row.shape]
    config = AutoConfig.for_model(model_type, use_cache=False, **fields)
    if row.method != "qlora":
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                setattr(module, name, _quantised(bnb, child, device))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                one = parameter.dim() == 1
                new = torch.ones if one else torch.randn
                value = new(parameter.shape, device=device, dtype=torch.bfloat16).mul_(1.0 if one else STD)
                module._parameters[name] = torch.nn.Parameter(value)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config, device=device)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:  # Gemma's scale of the embeddings
                module._buffers[name] = torch.tensor(config.hidden_size**0.5, device=device, dtype=torch.bfloat16)
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
    )
    model.config.quantization_config = quantisation
    model.hf_quantizer = Bnb4BitHfQuantizer(quantisation)
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = "bitsandbytes"
    model.hf_device_map = {"": device.index}
    return model


def _quantised(bnb: Any, linear: torch.nn.Linear, device: torch.device) -> Any:
    shape = (linear.out_features, linear.in_features)
    made = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
    )
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(STD)
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True).to(device)
    return made


def make_arguments(row: Row, num_steps: int, world_size: int, packing: bool) -> Any:
    from trl import SFTConfig

    recompute, fsdp = bool(row.peer.get("recompute")), bool(row.peer.get("fsdp")) and world_size > 1
    sharding: dict[str, Any] = {}
    if fsdp:
        sharding = {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "version": 2,
                "fsdp_version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": [BLOCKS[SHAPES[row.shape][0]]],
                "activation_checkpointing": recompute,
                "reshard_after_forward": True,
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        }
    return SFTConfig(
        output_dir="/tmp/manyhands-bench-peer",
        per_device_train_batch_size=row.rows,
        max_steps=num_steps,
        learning_rate=1e-5,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        max_length=row.length,
        packing=packing,
        gradient_checkpointing=recompute and not fsdp,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=torch.cuda.is_available(),
        dataset_kwargs={"skip_prepare_dataset": not packing},
        optim="adamw_torch_fused",
        dataloader_num_workers=2,
        ddp_find_unused_parameters=False,
        **sharding,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=sorted(BY_NAME), required=True)
    parser.add_argument("--shape", help="another shape, such as tiny to try this on a CPU")
    parser.add_argument("--length", type=int, help="tokens a row")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--packing", action="store_true", help="mixed lengths: TRL's own packing in place of padding")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    row = BY_NAME[options.row]
    row = replace(row, shape=options.shape or row.shape, length=options.length or row.length)
    rank, world_size, local = (int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    times, failure = measure(row, options, device, world_size)
    if rank == 0:
        result = summarise(row, options, times, failure, world_size)
        print("RESULT " + json.dumps(result), flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(result) + "\n")


def measure(row: Row, options: argparse.Namespace, device: torch.device, world_size: int) -> tuple[list[tuple[float, int]], str]:
    """(time after each step, useful tokens of the step on this rank), and why it ended early."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(NUM_WORDS)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2", unk_token="0")
    count = row.rows * world_size * options.steps
    lengths = [row.length] * count if row.data == "full" else (mix_lengths(2048) * -(-count // 2048))[:count]
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, NUM_WORDS, (row.length,), generator=draw).tolist()
    rows = Dataset.from_dict({"input_ids": [ids[:length] for length in lengths]})
    adapter = None
    if row.method != "full":
        adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    times: list[tuple[float, int]] = []
    seen = [0]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter(), seen[0]))

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            seen[0] += int((inputs["labels"] != -100).sum())
            return super().compute_loss(model, inputs, *arguments, **keywords)

    trainer = Counting(
        model=build_model(row, device),
        args=make_arguments(row, options.steps, world_size, options.packing),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[Clock()],
    )
    try:
        trainer.train()
    except torch.OutOfMemoryError:
        return times, "out of memory"
    return times, ""


def summarise(row: Row, options: argparse.Namespace, times: list[tuple[float, int]], failure: str, world_size: int) -> dict[str, Any]:
    import peft
    import transformers
    import trl

    result: dict[str, Any] = {
        "row": row.name,
        "label": "trl" + ("-packing" if options.packing else ""),
        "gpus": world_size,
        "length": row.length,
        "rows": row.rows,
        **row.peer,
        "failure": failure,
        "versions": {
            "trl": trl.__version__,
            "peft": peft.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }
    timed = times[options.warm - 1 :]
    if not failure and len(timed) > 1:
        seconds = timed[-1][0] - timed[0][0]
        tokens = (timed[-1][1] - timed[0][1]) if row.data == "mix" else row.rows * row.length * (len(timed) - 1)
        rate = tokens / seconds
        result |= {
            "num_timed_steps": len(timed) - 1,
            "step_s": round(seconds / (len(timed) - 1), 4),
            "tokens_per_s_gpu": round(rate),
            "dtypes": "adapters float32, frozen weights bfloat16 or NF4" if row.method != "full" else "weights, gradients, AdamW bfloat16",
        }
        if row.data == "full":
            result["tflops"] = round(rate * flops_per_token(row.shape, row.length, full=row.method == "full") / 1e12, 1)
    if torch.cuda.is_available():
        result["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        result["device"] = torch.cuda.get_device_name()
    return result


if __name__ == "__main__":
    main()
