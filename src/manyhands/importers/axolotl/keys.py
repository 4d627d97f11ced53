"""Axolotl's keys (July 2026) by what becomes of them; the second column of ``_REFUSED`` is the message."""

from types import MappingProxyType

from manyhands.config.text import names
from manyhands.importers import preferences, shared

# Without effect on what is trained, or true here by construction.
ALREADY = names(
    """
    tokenizer_type cls_model_config tokenizer_use_fast tokenizer_save_jinja_files type_of_model
    embeddings_skip_upcast experimental_skip_move_to_device low_cpu_mem_usage device device_map local_rank world_size
    ddp ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters qlora_sharded_model_loading
    lora_on_cpu lora_fan_in_fan_out merge_method dataset_prepared_path dataset_processes dataset_num_proc
    dataset_keep_in_memory num_dataset_shards_to_save accelerator_config remove_unused_columns hf_use_auth_token
    shuffle_merged_datasets
    shuffle_before_merging_datasets preprocess_iterable is_preprocess total_num_tokens total_supervised_tokens
    axolotl_config_path is_falcon_derived_model is_llama_derived_model is_mistral_derived_model
    is_qwen_derived_model strict gradient_checkpointing_kwargs
    eval_sample_packing pad_to_sequence_len pad_to_multiple_of batch_flattening multipack_real_batches
    sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method sample_packing_eff_est
    pretrain_multipack_buffer_size streaming_multipack_buffer_size eval_batch_size
    include_tokens_per_second include_tkps gc_steps torch_empty_cache_steps gc_collect_steps torchdistx_path
    attn_implementation flash_attention flex_attention sdp_attention xformers_attention sage_attention eager_attention
    flex_attn_compile_kwargs flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum
    flash_attn_d512 gemma4_hybrid_attn_impl large_head_attention sdpa_varlen fused_attn_kernel
    chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy liger_rope liger_rms_norm
    liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy
    liger_fused_linear_cross_entropy tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp lora_embedding_kernel
    fsdp_version fsdp_final_state_dict_type
    heads_k_stride ring_attn_func resources_per_worker ray_run_name greater_is_better
    gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature
    """
)

# As in transformers.py: values that are so here, and why any other one changes nothing.
SO = MappingProxyType(
    {
        "dataloader_pin_memory": ((True,), "batches reach a GPU from pinned memory"),
        "dataloader_num_workers": ((), "`data.workers: auto` takes as many as the batches need"),
        "dataloader_prefetch_factor": ((), "batches are prepared ahead"),
        "save_safetensors": ((True,), "weights are always saved as safetensors"),
        "save_only_model": ((False,), "checkpoints always hold what a run resumes from"),
        "auto_resume_from_checkpoints": ((True,), "the same command resumes a run; `--fresh` begins another"),
        "torch_compile_backend": (("inductor",), "the compiler is inductor"),
        "torch_compile_mode": (("default",), "blocks are compiled one by one, in inductor's default mode"),
        "torch_compile_options": ((), "blocks are compiled one by one, with inductor's own options"),
    }
)

# Trackers, as transformers calls them: the key that opens one, and that of its project, which opens it, too.
TRACKERS = MappingProxyType(
    {
        "wandb": ("use_wandb", "wandb_project"),
        "mlflow": ("use_mlflow", "mlflow_experiment_name"),
        "trackio": ("use_trackio", "trackio_project_name"),
        "tensorboard": ("use_tensorboard", ""),
        "comet_ml": ("use_comet", "comet_project_name"),
        "swanlab": ("use_swanlab", "swanlab_project"),
        "OpenTelemetry": ("use_otel_metrics", ""),
    }
)
TRACKER_OPTIONS = MappingProxyType(
    {
        **shared.TRACKER_OPTIONS,
        "wandb_mode": "W&B takes it from the variable WANDB_MODE",
        "mlflow_tracking_uri": "MLflow takes it from the variable MLFLOW_TRACKING_URI",
        "mlflow_run_name": "a tracker's run is named as the run is",
        "hf_mlflow_log_artifacts": "no model is sent to trackers",
    }
)
OF_TRACKERS = {key for pair in TRACKERS.values() for key in pair if key} | names(
    """
    comet_api_key comet_workspace comet_experiment_key comet_mode comet_online comet_experiment_config
    otel_metrics_host otel_metrics_port swanlab_experiment_name swanlab_description swanlab_mode
    swanlab_workspace swanlab_api_key swanlab_log_model swanlab_web_host swanlab_api_host swanlab_lark_webhook_url
    swanlab_lark_secret swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer
    """
)
# Said, and not acted upon, where they are set.
UPLOADS = names("hub_model_id hub_strategy hub_revision push_dataset_to_hub")
_MEASURES = names(
    """
    do_bench_eval bench_dataset bench_split do_causal_lm_eval eval_causal_lm_metrics eval_table_size lm_eval_tasks
    lm_eval_batch_size lm_eval_model lm_eval_post_train generate_samples num_generation_samples
    generation_max_new_tokens generation_temperature generation_top_p generation_top_k generation_prompt_ratio
    generation_do_sample eval_max_new_tokens
    """
)
_KERNELS_OF_EXPERTS = names(
    """
    use_kernels use_scattermoe use_sonicmoe experts_implementation expert_backend moe_bnb_fast moe_dequant_chunk_size
    moe_grouped_backend
    """
)
_ROUTES_TO_EXPERTS = names(
    """
    expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
    expert_parallel_fallback_on_unsupported
    """
)
IGNORED = MappingProxyType(
    {
        **dict.fromkeys(UPLOADS, "nothing is uploaded: `hf upload` takes the run's folder"),
        **dict.fromkeys(_MEASURES, "an evaluation is the validation loss and a few answers (`evaluate.prompts`)"),
        **dict.fromkeys(("profiler_steps", "profiler_steps_start"), "no profile is written"),
        **dict.fromkeys(("max_memory", "gpu_memory_limit"), "the plan takes the memory that each GPU has free"),
        **dict.fromkeys(_KERNELS_OF_EXPERTS, "experts have one implementation here, of kernels that pass a self-test"),
        **dict.fromkeys(_ROUTES_TO_EXPERTS, "tokens are sent by torch.distributed"),
        "auto_find_batch_size": "the batch stays as it is written; the plan finds how it fits",
        "save_first_step": "the first checkpoint is at the first interval",
        "dynamic_checkpoint": "a signal that ends the run also saves it",
        "default_system_message": "Axolotl's own chatml template has no system message to replace",
        "float32": "Axolotl does not read it: `bf16: false` is float32",
    }
)

# Names that published files have and Axolotl itself does not read, although they look like keys that train.
NOT_READ_THERE = names(
    """
    context_parapllel_size eta_min adam_eps gptq_groupsize gptq_model_v1 gptq_disable_exllama debug test_value
    torch_dtype full_finetune base_model_ignore_patterns sample_packing_seq_len_multiplier data_seed
    """
)

# Any other training than supervised fine-tuning: one reason for the whole file.
OUT_OF_SCOPE = MappingProxyType(
    {"rl": preferences.ONLINE, "reward_model": preferences.REWARD, "process_reward_model": preferences.REWARD}
)
ONLY_WITH_RL = names(
    """
    trl vllm ebft dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free
    dpo_loss_type dpo_loss_weights dpo_beta dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha
    orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight rl_beta max_prompt_len
    center_rewards_coefficient num_labels
    """
)

_EXPERTS = "not available for experts: remove it"
QUANTIZED = "quantized bases are not available but for NF4 (`adapter: qlora` with a model in bfloat16)"
_OPTIMIZER = "this optimizer is not available"
_REFUSED = {
    "expert_parallel_token_capacity": "no token is dropped: remove it",
    """
    llama4_linearized_experts
    dsv4_fp4_grouped_mode dsv4_bf16_all dsv4_fp8_lora_kernel dsv4_fp8_nonexpert_mode dsv4_shared_mlp_lora_kernel
    use_dsv4_kernels use_glm_dsa_kernels dense_mixer
    """: _EXPERTS,
    """
    gptq use_onebitllms nvfp4_merge_aware
    nvfp4_merge_aware_start_step nonexpert_quantization gemma4_fp8_nonexpert gemma4_nf4_nonexpert
    """: QUANTIZED,
    "qat": "training with simulated quantization is not available",
    "quantization": "quantizing the result is not available",
    "diffusion": "diffusion language models are not available",
    "llmcompressor recipe save_compressed": "training for sparse weights is not available",
    "relora relora_prune_ratio relora_prune_method relora_cpu_offload": "ReLoRA is not available",
    "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps": "restarts of the rate are not "
    "available",
    "lisa_n_layers lisa_step_interval lisa_layers_attribute": "LISA is not available",
    "use_eaft eaft_alpha eaft_k": "the EAFT loss is not available: cross-entropy is trained",
    "mora": "MoRA is not available",
    "hatchery nemo_gym_enabled nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets "
    "nemo_gym_dir nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn nemo_gym_run_timeout "
    "nemo_gym_server_timeout nemo_gym_verify_timeout": "training on another service is not available",
    "kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url kd_online_topk "
    "kd_online_server kd_online_timeout kd_temperature_min": "distillation is not available",
    "grokfast_alpha grokfast_lamb": "Grokfast is not available",
    "spectrum_top_fraction spectrum_model_name": "Spectrum is not available: name the weights in `unfrozen_parameters`",
    "liger_use_token_scaling": "another loss than the mean over loss tokens is not available",
    "scaling_softmax scaling_softmax_factor scaling_softmax_bias": "only the model's own attention is available",
    "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks": "PoSE is not available",
    "rope_scaling s2_attention unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o "
    "unsloth_rms_norm unsloth_rope": "Axolotl itself refuses this key: remove it",
    "ple_cpu_offload": "keeping per-layer embeddings in host memory is not available",
    "fp8_config": "there is one recipe for fp8: `manyhands config kernels.linear`",
    "trainer_cls": "a trainer of your own is not available",
    "layer_offloading": "write `fsdp_config.offload_params: true`",
    "peft_layers_to_transform peft_layers_pattern": "write the layers in `lora_target_modules` as a regular expression",
    "peft_layer_replication": "copies of layers are not available",
    "peft_trainable_token_indices fix_untrained_tokens": "training single embeddings is not available",
    "lora_rank_pattern lora_alpha_pattern": "one rank for all modules: use `lora_r` and `lora_alpha`",
    "added_tokens_overrides": "renaming tokens is not available: use `tokens`",
    "shrink_embeddings mean_resizing_embeddings": "new embeddings get the mean of the others, none are removed",
    "model_kwargs overrides_of_model_kwargs": "settings of the model cannot be changed here: change its config.json",
    "group_by_length": "batches of samples of like length would be another order: packing wastes less",
    "dataset_shard_num dataset_shard_idx": "parts of a dataset: write a slice, such as `split: train[:10%]`",
    "skip_prepare_dataset": "samples are always tokenized before training",
    "pretraining_sample_concatenation": "documents of a pack never see each other",
    "embedding_lr embedding_lr_scale": "write it as `optimizer.learning_rates` in a native file",
    "lr_groups": "write it as `optimizer.learning_rates` in a native file (`manyhands import`)",
    "optim_args optim_target_modules": "arguments of optimizers that are not available",
    "adam_beta3 adam_epsilon2 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of": _OPTIMIZER,
    "qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits "
    "qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size": _OPTIMIZER,
    "lr_div_factor": "the one-cycle schedule is not available",
    "fp32_norms fp32_norm_classes": "norms compute in float32 as the model has it: remove it",
    "deepcompile": "DeepSpeed is not available",
}
# Refused where they are on: not null, false, 0 or empty.
REFUSED = MappingProxyType({key: why for keys, why in _REFUSED.items() for key in keys.split()})

# Keys of one method that do nothing where the method is off: the key that turns it on, the first one of its line above.
_SWITCHES = names("relora jagged_restart_steps lisa_n_layers use_eaft scaling_softmax use_pose")
PART_OF = MappingProxyType(
    {
        **{key: switch for switch, *inner in map(str.split, _REFUSED) if switch in _SWITCHES for key in inner},
        "expert_parallel_token_capacity": "expert_parallel_size",
        "deepcompile": "deepspeed",
    }
)  # fmt: skip

# Plugins, by the end of their module's name: None where ours does the same or needs nothing.
PLUGINS = MappingProxyType(
    {
        "cut_cross_entropy": None,
        "liger": None,
        "swanlab": None,
        "lm_eval": None,
        "kernels": None,
        "expert_parallel": None,
        "densemixer": _EXPERTS,
        "diffusion": REFUSED["diffusion"],
        "llm_compressor": REFUSED["llmcompressor"],
        "kd": REFUSED["kd_trainer"],
        "grokfast": REFUSED["grokfast_alpha"],
        "spectrum": REFUSED["spectrum_top_fraction"],
        "mora": REFUSED["mora"],
        "hatchery": REFUSED["hatchery"],
        "nemo_gym": REFUSED["hatchery"],
    }
)

FSDP = names(
    """
    version activation_checkpointing offload_params sync_module_states cpu_ram_efficient_loading cpu_offload_pin_memory
    use_orig_params state_dict_type final_state_dict_type auto_wrap_policy transformer_layer_cls_to_wrap min_num_params
    reshard_after_forward mixed_precision_policy
    """
)
# Keys of FSDP that Axolotl's schema drops, and that people still write.
FSDP_NOT_READ = names("sharding_strategy limit_all_gathers backward_prefetch forward_prefetch")
SPECIAL = names("bos_token eos_token pad_token unk_token additional_special_tokens")

MAPPED = names(
    """
    base_model base_model_config revision_of_model model_revision trust_remote_code reinit_weights tokenizer_config
    tokenizer_legacy tokenizer_use_mistral_common model_config overrides_of_model_config model_quantization_config
    model_quantization_config_kwargs model_type special_tokens tokens resize_token_embeddings_to_32x eot_tokens
    chat_template chat_template_jinja chat_template_kwargs datasets test_datasets pretraining_dataset streaming
    dataset_exact_deduplication sample_packing_sequentially curriculum_sampling sequence_len eval_sequence_len
    min_sample_len excess_length_strategy sample_packing max_packed_sequence_len
    train_on_inputs val_set_size micro_batch_size
    gradient_accumulation_steps batch_size num_epochs max_steps learning_rate optimizer adam_beta1 adam_beta2
    adam_epsilon weight_decay max_grad_norm neftune_noise_alpha noisy_embedding_alpha lr_scheduler lr_scheduler_kwargs
    cosine_min_lr_ratio
    cosine_constant_lr_ratio lr_quadratic_warmup warmup_ratio warmup_steps seed adapter load_in_4bit load_in_8bit
    lora_r lora_alpha lora_dropout lora_target_linear lora_target_modules lora_modules_to_save lora_model_dir
    peft_use_dora peft_use_rslora peft peft.loftq_config peft.loftq_config.loftq_bits peft_init_lora_weights
    peft_ensure_weight_tying peft_autocast_adapter_dtype loraplus_lr_ratio loraplus_lr_embedding bnb_config_kwargs
    merge_lora unfrozen_parameters bf16 bfloat16 fp16 float16 fp8
    fp8_enable_fsdp_float8_all_gather gradient_checkpointing activation_offloading
    selective_checkpointing torch_compile fsdp fsdp_config dp_shard_size dp_replicate_size expert_parallel_size
    context_parallel_size
    sequence_parallel_degree tensor_parallel_size deepspeed use_ray ray_num_workers plugins lora_mlp_kernel
    lora_qkv_kernel lora_o_kernel logging_steps saves_per_epoch evals_per_epoch resume_from_checkpoint save_steps
    save_total_limit save_strategy pretrain_multipack_attn eval_steps eval_strategy ddp_timeout
    evaluation_strategy early_stopping_patience
    load_best_model_at_end metric_for_best_model loss_watchdog_threshold loss_watchdog_patience
    dataloader_drop_last tf32 output_dir processor_type image_size image_resize_algorithm processor_kwargs
    role_boundaries
    freeze_mm_modules quantize_moe_experts lora_target_parameters
    """
)

KEYS = (
    ALREADY | OF_TRACKERS | TRACKER_OPTIONS.keys()
    | SO.keys() | MAPPED | frozenset(IGNORED) | frozenset(REFUSED) | frozenset(OUT_OF_SCOPE)
    | ONLY_WITH_RL | NOT_READ_THERE
    | {f"special_tokens.{key}" for key in SPECIAL}
    | {f"fsdp_config.{prefix}{key}" for key in FSDP | FSDP_NOT_READ for prefix in ("", "fsdp_")}
)  # fmt: skip
# Keys that change a run: names like them are taken for misspelt ones.
ACTING = (MAPPED | frozenset(REFUSED) | frozenset(OUT_OF_SCOPE)) - NOT_READ_THERE
# Keys whose mappings have names of their own, which are read with them.
OPEN = names(
    """
    trl vllm ebft qat quantization diffusion llmcompressor mora hatchery model_config model_kwargs
    overrides_of_model_config overrides_of_model_kwargs model_quantization_config_kwargs bnb_config_kwargs tokens
    gradient_checkpointing_kwargs selective_checkpointing flex_attn_compile_kwargs accelerator_config
    torch_compile_options chat_template_kwargs lr_scheduler_kwargs optim_args deepspeed resources_per_worker max_memory
    device_map dynamic_checkpoint lora_rank_pattern lora_alpha_pattern peft_trainable_token_indices processor_kwargs
    added_tokens_overrides comet_experiment_config kd_online_server fp8_config
    """
)

# Of one entry of datasets, test_datasets or pretraining_dataset.
ENTRY = names(
    """
    path split type input_transform shards shards_idx preprocess_shards conversation chat_template chat_template_jinja
    data_files input_format name ds_type field field_human field_model field_messages field_tools field_thinking
    field_chosen field_rejected
    template_thinking_key message_field_role message_field_content message_property_mappings message_field_training
    message_field_training_detail split_thinking logprobs_field temperature roles_to_train train_on_eos train_on_eot
    roles drop_system_message trust_remote_code revision text_column skip
    """
)
