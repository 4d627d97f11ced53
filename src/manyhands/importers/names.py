"""What other tools call things: keys and values of Axolotl, LLaMA-Factory, TRL, transformers, torchtune and ms-swift;
those without a key of ours, where their importer has no answer that fits a native file.

For error messages only: these names are never accepted. A name is looked up with its section first
(``evaluate.num_samples``), then without. Knows no schema.
"""

from collections.abc import Mapping
from types import MappingProxyType

from manyhands.importers import preferences
from manyhands.optim.registry import names_in

# Our key, and what other tools call it.
_SAME = {
    "model.name": "base_model model_name_or_path model_name model_id pretrained_model_name_or_path "
    "base_model_config tokenizer_name_or_path",
    "model.revision": "revision_of_model model_revision",
    "model.dtype": "bf16 bfloat16 torch_dtype compute_dtype bnb_4bit_compute_dtype",
    "model.chat_template": "chat_template_path chat_template_jinja template",
    "model.init": "reinit_weights",
    "model.new_tokens": "add_tokens add_special_tokens new_special_tokens",
    "method.name": "finetuning_type train_type tuner_type use_peft peft_method",
    "method.rank": "lora_r lora_rank r",
    "method.alpha": "lora_alpha",
    "method.dropout": "lora_dropout",
    "method.neftune_alpha": "neftune_noise_alpha noisy_embedding_alpha neftune",
    "method.target_modules": "lora_target lora_target_modules target_modules lora_target_linear lora_modules",
    "method.modules_to_save": "lora_modules_to_save additional_target",
    "method.adapter": "lora_model_dir adapter_name_or_path adapter_path resume_from_adapter",
    "method.double_quant": "double_quantization bnb_4bit_use_double_quant use_bnb_nested_quant",
    "method.rslora": "use_rslora peft_use_rslora",
    "method.dora": "use_dora peft_use_dora lora_use_dora",
    "method.train": "unfrozen_parameters trainable_parameters freeze_trainable_modules freeze_trainable_layers",
    "data.train": "dataset datasets train_file train_data dataset_name dataset_mixer dataset_mixture dataset_id "
    "pretraining_dataset data_path data_files train_dataset",
    "data.validation": "val_file validation_file test_datasets eval_dataset val_dataset eval_file",
    "data.validation_fraction": "val_set_size val_size split_dataset_ratio test_split_size val_split",
    "data.max_length": "cutoff_len max_seq_len max_seq_length sequence_len model_max_length seq_len block_size "
    "context_length",
    "data.too_long": "excess_length_strategy truncation_strategy",
    "data.max_samples": "max_samples max_train_samples num_samples",
    "data.train_on": "train_on_inputs train_on_prompt assistant_only_loss completion_only_loss mask_history "
    "roles_to_train loss_scale",
    "data.packing": "sample_packing pack packed eval_packing neat_packing padding_free",
    "data.workers": "dataloader_num_workers num_workers",
    "data.cache": "dataset_prepared_path cache_dir tokenized_path",
    "data.fields": "field_messages message_property_mappings columns dataset_text_field field column_mapping",
    "data.format": "data_format conversation dataset_format",
    "batch.samples": "global_batch_size",
    "batch.accumulation": "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps",
    "optimizer.name": "optim",
    "optimizer.learning_rate": "lr",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.max_grad_norm": "grad_clip gradient_clip gradient_clipping clip_grad_norm gradient_clip_val",
    "optimizer.learning_rates": "loraplus_lr_ratio embedding_learning_rate lr_groups",
    "schedule.name": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.min_ratio": "cosine_min_lr_ratio min_lr_rate",
    "schedule.warmup_ratio": "warmup",
    "schedule.warmup_steps": "num_warmup_steps",
    "preference.beta": "beta pref_beta dpo_beta rl_beta kto_beta orpo_alpha",
    "preference.loss": "pref_loss loss_type dpo_loss_type",
    "preference.margin": "simpo_gamma",
    "preference.label_smoothing": "dpo_label_smoothing",
    "preference.sft_weight": "pref_ftx rpo_alpha",
    "preference.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "preference.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "preference.reference": "precompute_ref_log_probs",
    "stop.epochs": "num_epochs num_train_epochs n_epochs max_epochs",
    "stop.max_steps": "total_steps max_iters num_steps num_training_steps",
    "stop.patience": "early_stopping_patience",
    "stop.loss_above": "loss_watchdog_threshold",
    "stop.loss_above_steps": "loss_watchdog_patience",
    "parallel.gpus": "num_gpus nproc_per_node num_processes n_gpus devices ray_num_workers",
    "parallel.strategy": "fsdp fsdp_config fsdp_version distributed_strategy",
    "parallel.shard_degree": "dp_shard_size",
    "parallel.context_degree": "context_parallel_size cp_size sequence_parallel_degree",
    "parallel.expert_degree": "expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "parallel.activation_checkpointing": "gradient_checkpointing activation_checkpointing "
    "enable_activation_checkpointing gradient_checkpointing_kwargs recompute_granularity",
    "parallel.offload_activations": "activation_offloading enable_activation_offloading",
    "parallel.compile": "torch_compile",
    "parallel.timeout_s": "ddp_timeout",
    "kernels.lora": "lora_mlp_kernel lora_qkv_kernel lora_o_kernel",
    "kernels.linear": "fp8",
    "evaluate.every_steps": "eval_steps eval_strategy evaluation_strategy eval_interval do_eval",
    "evaluate.per_epoch": "evals_per_epoch",
    "evaluate.prompts": "eval_table_size num_eval_samples evaluate.num_prompts",
    "checkpoint.every_steps": "save_steps save_strategy checkpoint_interval",
    "checkpoint.per_epoch": "saves_per_epoch",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.keep_best": "load_best_model_at_end",
    "log.every_steps": "logging_steps log_every_n_steps log_interval",
    "output.dir": "output_dir out_dir",
    "output.merge": "merge_lora merge_adapter",
    # sections
    "evaluate": "evaluation eval",
    "checkpoint": "checkpoints checkpointing",
    "method": "peft lora",
    "optimizer": "optimization",
    "log": "logging",
    "name": "run_name experiment_name wandb_run_name",
    "task": "stage task_type",
    "seed": "random_seed",
}  # fmt: skip

_SHARDED = "weights, gradients and optimizer states"
_STRATEGIES = "is not supported: `parallel.strategy` is auto, single, ddp, fsdp or hsdp"
_FUSED = "fused kernels are used automatically if they pass a self-test, see `manyhands config kernels`"
_TRACKERS = (
    "metrics are written to metrics.jsonl and, with `log.tensorboard`, to TensorBoard; `log.wandb`, `log.mlflow` and "
    "`log.trackio` name a project of theirs"
)
_QLORA = "for 4-bit weights set `method.name: qlora`"

# Notes on keys that need their own sentence or have no counterpart: the keys by their note.
_NOTES = {
    "`moe.balance` is this value times the experts of a token (num_experts_per_tok)": "router_aux_loss_coef "
    "moe_aux_loss_coef",
    "`evaluate.max_tokens` limits the validation tokens that are measured, and `evaluate.prompts` is the number of "
    "prompts answered": "max_eval_samples eval_samples evaluate.num_samples evaluate.max_samples evaluate.limit",
    "in other tools it counts one GPU. Here `batch.samples` is the global batch, over all GPUs and accumulation steps, "
    "and `batch.micro_samples` (without packing) what one GPU processes at once": "batch_size train_batch_size "
    "micro_batch_size per_device_train_batch_size per_device_batch_size",
    "evaluation uses the micro-batches of training; remove it": "per_device_eval_batch_size eval_batch_size",
    "the method is `method.name: lora` (or qlora, full); `method.adapter` is an adapter to continue from": "adapter",
    _QLORA: "load_in_4bit quantization_bit quant_config",
    f"{_QLORA}, which is NF4": "bnb_4bit_quant_type",
    "an 8-bit base model is not supported: use `method.name: lora` (16-bit) or qlora (4-bit)": "load_in_8bit",
    "float16 is not supported: `model.dtype` is bfloat16 on GPUs that have it, else float32": "fp16 float16",
    preferences.NOT_HERE: " ".join((*preferences.KEYS, "rl", "beta")),
    "order, weights and dropout have one seed, `seed`": "data_seed",
    "here it is `parallel.strategy: zero1`, `zero2` or `zero3`; a DeepSpeed file goes to "
    "`--deepspeed FILE`": "deepspeed zero_stage",
    f"tensor parallelism {_STRATEGIES}": "tensor_parallel_size",
    f"pipeline parallelism {_STRATEGIES}": "pipeline_model_parallel_size",
    f"sequence parallelism {_STRATEGIES}": "sequence_parallel_size",
    _TRACKERS: "report_to use_wandb wandb wandb_project wandb_entity wandb_watch wandb_log_model use_swanlab "
    "mlflow_tracking_uri trackio_project_name",
    f"{_TRACKERS}; the run's name is `name`": "wandb_name",
    "TensorBoard files are in the run's folder; `log.tensorboard: false` turns them off": "logging_dir",
    "the fastest attention kernel for the GPU is chosen; `kernels.attention: reference` is torch's own": "flash_attn "
    "attn_implementation flash_attention use_flash_attention_2 sdp_attention xformers_attention",
    _FUSED: "use_liger_kernel liger_fused_linear_cross_entropy",
    f"there are no plugins; {_FUSED}": "plugins",
    "log in with `hf auth login`; run files contain no secrets": "hf_use_auth_token",
    "starting the same run again resumes it; `--fresh` begins a new one": "resume_from_checkpoint "
    "auto_resume_from_checkpoints",
    "special tokens are those of the tokenizer; `model.new_tokens` adds more": "special_tokens",
    "packing fills micro-batches evenly in any order, see `data.packing`": "group_by_length",
    "data is prepared on all cores; remove it": "dataset_processes dataset_num_proc",
    "`parallel.strategy` decides where weights are placed; remove it": "device_map",
    "weights are always read slice by slice; remove it": "low_cpu_mem_usage",
    "it is taken from the model's config.json; remove it": "model_type",
    "it is taken from the model's folder; remove it": "tokenizer_type",
    "remove it: it has no effect here": "debug",
    "unknown keys are always an error; remove it": "strict",
}

# By our key: values of other tools, or everyday words, and what they are here.
VALUES = MappingProxyType(
    {
        "task": {
            "dpo": "write preference",
            **{name: f"write preference, with preference.loss: {name}" for name in ("ipo", "cpo", "simpo", "orpo")},
            **dict.fromkeys(("ppo", "grpo"), preferences.ONLINE),
            **dict.fromkeys(("rl", "rlhf"), preferences.NOT_HERE),
            **dict.fromkeys(("rm", "reward"), preferences.REWARD),
            **dict.fromkeys(("pt", "pretrain", "pretraining", "completion", "clm"), "write cpt for training on text"),
            **dict.fromkeys(("chat", "instruct", "instruction", "finetune"), "write sft for training on conversations"),
        },
        "method.name": {
            "dora": "write lora with dora: true",
            "rslora": "write lora with rslora: true",
            "loftq": "write qlora with init: loftq",
            "freeze": "write patterns, with train or freeze",
            "fft": "write full",
            "oft": "OFT is not supported",
            "dpo": "write task: preference",
            "orpo": "write task: preference, with preference.loss: orpo",
            "kto": "write task: kto",
        },
        "model.dtype": {
            **dict.fromkeys(("bf16", "bfloat"), "write bfloat16"),
            **dict.fromkeys(("fp32", "float"), "write float32"),
            **dict.fromkeys(("fp16", "float16", "half"), "float16 is not supported: use bfloat16, or float32"),
            "fp8": "write bfloat16, with kernels.linear: fp8",
        },
        "optimizer.name": {
            theirs: f"write {ours}" + (f": {note}" if note else "")
            for theirs, (ours, note) in names_in("transformers", "others").items()
        },
        "schedule.name": {
            "constant_with_warmup": "write constant, with warmup_ratio or warmup_steps",
            "cosine_with_min_lr": "write cosine, with min_ratio",
            "warmup_stable_decay": "write wsd",
        },
        "parallel.strategy": {
            "none": "write single",
            **dict.fromkeys(("fsdp2", "full_shard"), f"write fsdp, which shards {_SHARDED}"),
            "deepspeed": f"write zero1, zero2 or zero3, or fsdp, which shards {_SHARDED}",
            "hybrid_shard": "write hsdp",
        },
        "parallel.activation_checkpointing": {
            **dict.fromkeys(("true", "True"), "write full"),
            **dict.fromkeys(("false", "False"), "write none"),
        },
        "data.train_on": {
            **dict.fromkeys(("inputs", "true", "everything"), "write all"),
            **dict.fromkeys(("completion", "answer", "answers", "false"), "write assistant"),
        },
    }
)  # fmt: skip

KEYS = MappingProxyType({name: key for key, names in _SAME.items() for name in names.split()})
NOTES = MappingProxyType(
    {
        name: note
        for note, names in _NOTES.items()
        for name in names.split()
        if note != preferences.NOT_HERE or name not in KEYS
    }
)


def find_key(path: str) -> str | None:
    """Our key for another tool's, given with or without its section; None if it is none of theirs or has a note."""
    return None if find_note(path) else _look_up(path, KEYS)


def find_note(path: str) -> str | None:
    """What to say about another tool's key that has no single counterpart."""
    return _look_up(path, NOTES)


def find_value(key: str, value: str) -> str | None:
    """What to write for another tool's value of our key."""
    return VALUES.get(key, {}).get(value.lower())


def _look_up(path: str, table: Mapping[str, str]) -> str | None:
    return table.get(path) or table.get(path.rsplit(".", 1)[-1])
