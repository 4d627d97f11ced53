"""The same work by TRL with Liger kernels: random weights of the same shape, all tokens trained. Prints one JSON line.

    torchrun --nproc_per_node=1 -m benchmarks.peer_trl --row 8b-lora --output rows.jsonl
    torchrun --nproc_per_node=1 -m benchmarks.peer_trl --row 8b-lora-mix --packing --output rows.jsonl

Follows TRL's own recommendations for speed: Liger kernels, fused AdamW, bfloat16, no padding where rows are full. Rows
of mixed lengths are padded, ``--micro`` of them at a time, or laid into packs of the longest row's length by TRL's
best-fit packing. Its packs need a kernel that knows documents: FlashAttention 4 where transformers finds it, else sdpa
with a mask that transformers makes from the positions, which is right and slow. Only tokens that are not padding count.
Needs trl, peft and liger-kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import peer_options
from manyhands.bench.rows import BY_NAME, BenchRow, mix_lengths, new_run, say
from manyhands.bench.shapes import NUM_WORDS, SHAPES
from manyhands.bench.summary import dtypes, lease, memory, rates, watch

MIX_MICRO = 4  # padded rows of mixed lengths at a time: 16,384 tokens
PACKS = 2  # packs of TRL's at a time: 8,192 tokens of 4,096 each, as in the rows of one length
BLOCKS = {"llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer", "gemma3_text": "Gemma3DecoderLayer"}
STD = 0.02


def choose_attention(packing: bool) -> str:
    """The fastest that transformers has here for what is asked."""
    from transformers.utils import import_utils

    has_flash_4 = getattr(import_utils, "is_flash_attn_4_available", lambda: False)
    return "flash_attention_4" if packing and torch.cuda.is_available() and has_flash_4() else "sdpa"


def measure_lengths_once() -> None:
    """transformers gives FlashAttention 4 the longest length of a pack as a tensor, which that refuses; here it is a
    number, read from the device once a batch and not in every layer.
    """
    from transformers import modeling_flash_attention_utils as attention

    prepare = attention.prepare_fa_kwargs_from_position_ids
    last: list[tuple[torch.Tensor, Any]] = []

    def prepare_once(position_ids: torch.Tensor) -> Any:
        if not last or last[0][0] is not position_ids:
            bounds, longest = prepare(position_ids)
            last[:] = [(position_ids, (bounds, tuple(int(length) for length in longest)))]
        return last[0][1]

    attention.prepare_fa_kwargs_from_position_ids = prepare_once


def is_sharded(row: BenchRow, world_size: int) -> bool:
    return bool(peer_options(row.name).get("fsdp")) and world_size > 1


def build_model(row: BenchRow, device: torch.device, attention: str, world_size: int) -> Any:
    """A bfloat16 model with random weights; for qlora its linear layers are made in NF4 one by one, and one that is
    sharded and mostly frozen is made in host memory, as it may be larger than a GPU.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = SHAPES[row.shape]
    config = AutoConfig.for_model(model_type, use_cache=False, attn_implementation=attention, **fields)
    in_host_memory = row.method == "lora" and is_sharded(row, world_size)
    if row.method != "qlora" and not in_host_memory:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if in_host_memory:
        noise = torch.empty(max(p.numel() for p in model.parameters()), dtype=torch.bfloat16)
        some = torch.randn(2**24) * STD  # repeated: speed and memory do not depend on the values
        for part in noise.split(len(some)):
            part.copy_(some[: len(part)])
        return _fill(model, torch.device("cpu"), lambda shape: noise[: math.prod(shape)].view(shape))
    _quantize(model, device)
    return _fill(model, device, lambda shape: torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(STD))


def _fill(model: Any, device: torch.device, make: Callable[[torch.Size], torch.Tensor]) -> Any:
    """Parameters and buffers on meta get values: matrices those of ``make``, norms ones."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                ones = parameter.dim() == 1
                value = (
                    torch.ones(parameter.shape, device=device, dtype=torch.bfloat16) if ones else make(parameter.shape)
                )
                module._parameters[name] = torch.nn.Parameter(value)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config, device=device)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:  # Gemma's scale of the embeddings
                module._buffers[name] = torch.tensor(model.config.hidden_size**0.5, device=device, dtype=torch.bfloat16)
    return model


def _quantize(model: Any, device: torch.device) -> None:
    """Linear layers in NF4, and the model marked as one that was loaded so."""
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and name != "lm_head":
                setattr(module, name, _quantized(bnb, child, device))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    model.config.quantization_config = quantization
    model.hf_quantizer = Bnb4BitHfQuantizer(quantization)
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = "bitsandbytes"
    model.hf_device_map = {"": device.type if device.index is None else device.index}


def _quantized(bnb: Any, linear: torch.nn.Linear, device: torch.device) -> Any:
    shape = (linear.out_features, linear.in_features)
    made = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        device="meta",
    )
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(STD)
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True).to(device)
    return made


def batch_sizes(row: BenchRow, packing: bool, micro: int | None) -> tuple[int, int]:
    """Rows, or packs, of a GPU at a time, and how often before a step."""
    if row.data == "full":
        return row.rows, 1
    if packing:
        return micro or PACKS, 1
    size = min(micro or MIX_MICRO, row.rows)
    return size, -(-row.rows // size)


def make_arguments(row: BenchRow, num_steps: int, world_size: int, packing: bool, micro: int | None) -> Any:
    from trl import SFTConfig

    size, accumulation = batch_sizes(row, packing, micro)
    recompute, fsdp = bool(peer_options(row.name).get("recompute")), is_sharded(row, world_size)
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
                "cpu_ram_efficient_loading": row.method == "lora",  # see build_model
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        }
    return SFTConfig(
        output_dir=str(Path(tempfile.gettempdir()) / "manyhands-bench-peer"),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        max_steps=num_steps + 1,  # see Clock
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
    parser.add_argument("--packing", action="store_true", help="mixed lengths: TRL's own packing in place of padding")
    parser.add_argument("--micro", type=int, help="mixed lengths: padded rows, or packs, of a GPU at a time")
    add_common(parser)
    options = parser.parse_args()
    row = read_row(options)
    rank, world_size, local = (
        int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    if choose_attention(options.packing) == "flash_attention_4":
        measure_lengths_once()
    clock = measure(row, options, device, world_size)
    if rank == 0:
        decided = {
            "label": "trl" + ("-packing" if options.packing else ""),
            "gpus": world_size,
            "micro": batch_sizes(row, options.packing, options.micro),
            "attention": choose_attention(options.packing),
        }
        say(summarise(row, options, clock, decided, ("trl", "peft", "liger_kernel")), options.output, "RESULT ")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Arguments of every peer."""
    parser.add_argument("--row", choices=sorted(BY_NAME), required=True)
    parser.add_argument("--shape", help="another shape, such as tiny to try this on a CPU")
    parser.add_argument("--length", type=int, help="tokens a row")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--run-name", dest="run", default=new_run(), help="name of the call that this row belongs to")
    parser.add_argument("--output", type=Path)


def read_row(options: argparse.Namespace) -> BenchRow:
    row = BY_NAME[options.row]
    return replace(row, shape=options.shape or row.shape, length=options.length or row.length)


class Clock:
    """Reads time and tokens after each synchronised step of a trainer of transformers. One more step than ``num_steps``
    must be asked for: in it memory, dtypes and attention kernels are read, and nothing is timed.
    """

    def __init__(self, num_steps: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.num_steps, self.num_tokens = num_steps, 0  # tokens of this GPU so far, counted by whoever knows them
        self.times: list[tuple[float, int]] = []
        self.seen: dict[str, Any] = {}
        self.failure = ""
        self._watching = contextlib.ExitStack()

    def callback(self, trainer_of: Callable[[], Any]) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
                if state.global_step == 0:
                    clock.tick()
                if state.global_step == clock.num_steps:
                    clock.read(trainer_of())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.tick()

        return Callback()

    def tick(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append((self._now(), self.num_tokens))

    def read(self, trainer: Any) -> None:
        """Before the additional step: what the timed ones took, and the profiler on."""
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wraps it
        self.seen |= memory() | {"dtypes": dtypes(trainer.model, optimizer)}
        self._watching.enter_context(watch(trainer.model, self.seen))

    def run(self, trainer: Any) -> None:
        """Trains, and keeps why it ended early."""
        with self._watching:
            try:
                trainer.train()
            except torch.OutOfMemoryError:
                self.failure = "out of memory"

    def steps(self) -> list[tuple[float, int]]:
        """(seconds, tokens of this GPU) of each step, without the additional one."""
        times = self.times[: self.num_steps + 1]
        return [(end - begin, after - before) for (begin, before), (end, after) in itertools.pairwise(times)]


def measure(row: BenchRow, options: argparse.Namespace, device: torch.device, world_size: int) -> Clock:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(NUM_WORDS)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2", unk_token="0")
    lengths = row_lengths(row, options, world_size)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, NUM_WORDS, (row.length,), generator=draw).tolist()
    rows = Dataset.from_dict({"input_ids": [ids[:length] for length in lengths]})
    adapter = None
    if row.method != "full":
        adapter = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    clock = Clock(options.steps)

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            clock.num_tokens += count_tokens(inputs, padded=row.data == "mix")
            return super().compute_loss(model, inputs, *arguments, **keywords)

    trainer = Counting(
        model=build_model(row, device, choose_attention(options.packing), world_size),
        args=make_arguments(row, options.steps, world_size, options.packing, options.micro),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[clock.callback(lambda: trainer)],
    )
    clock.run(trainer)
    return clock


def row_lengths(row: BenchRow, options: argparse.Namespace, world_size: int) -> list[int]:
    """Enough rows for all steps: as many as ours, or as fill TRL's packs."""
    size, accumulation = batch_sizes(row, options.packing, options.micro)
    count = size * accumulation * world_size * (options.steps + 2)
    if row.data == "full":
        return [row.length] * count
    mix = [min(length, row.length) for length in mix_lengths(2048)]
    if options.packing:
        count = -(-count * row.length * len(mix) // sum(mix)) + 1
    return (mix * -(-count // len(mix)))[:count]


def count_tokens(inputs: Any, *, padded: bool) -> int:
    """Tokens of a batch that are no padding: a pack has no mask, and no padding. Rows of one length wait for no
    mask.
    """
    mask = inputs.get("attention_mask") if padded else None
    return int(inputs["input_ids"].numel() if mask is None else mask.sum())


def summarise(
    row: BenchRow, options: argparse.Namespace, clock: Clock, decided: dict[str, Any], packages: Sequence[str]
) -> dict[str, Any]:
    """The raw row. The tokens are those that this GPU's batches held, padding left out."""
    result: dict[str, Any] = {
        "run": options.run,
        **lease(),
        "row": row.name,
        "shape": row.shape,
        "method": row.method,
        "length": row.length,
        "rows": row.rows,
        **decided,
        **peer_options(row.name),
        "failure": clock.failure,
        "versions": versions(
            *packages, "transformers", "torch", "bitsandbytes", "flash-attn-4", "flash-attn", "xformers"
        ),
    }
    if not clock.failure:
        result |= rates(clock.steps(), row, 1, warm=options.warm) | clock.seen
    return result


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
