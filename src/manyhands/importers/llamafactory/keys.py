"""The keys of LLaMA-Factory's argument classes (hparams/) beside transformers' own, by what becomes of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from manyhands.config.text import names
from manyhands.importers import preferences

TOOL = "LLaMA-Factory"
MARKS = names("template stage finetuning_type cutoff_len dataset_dir infer_backend export_dir")
OPEN = names("dataset_dir vllm_config sglang_config ray_init_kwargs extra_config kt_config generation_config")
# Read by name in run.py.
_MAPPED = names(
    """
    model_name_or_path model_revision trust_remote_code train_from_scratch add_tokens add_special_tokens resize_vocab
    split_special_tokens new_special_tokens_config init_special_tokens use_fast_tokenizer
    stage finetuning_type pure_bf16 quantization_bit moe_aux_loss_coef
    template dataset eval_dataset dataset_dir cutoff_len train_on_prompt mask_history streaming mix_strategy
    interleave_probs max_samples ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing
    tool_format default_system enable_thinking preserve_thinking tokenized_path
    use_muon ray_num_workers disable_gradient_checkpointing early_stopping_steps fp8 disable_shuffling
    """
)
OF_LORA = names(
    """
    additional_target lora_alpha lora_dropout lora_rank lora_target loraplus_lr_embedding use_rslora use_dora
    create_new_adapter adapter_name_or_path adapter_folder quantization_method quantization_type double_quantization
    """
)
OF_FREEZE = names("freeze_trainable_layers freeze_trainable_modules freeze_extra_modules")
# What is not here, by the switch, ...
FEATURES = MappingProxyType(
    {
        "use_galore": "GaLore",
        "use_apollo": "APOLLO",
        "use_badam": "BAdam",
        "use_adam_mini": "Adam-mini",
        "use_llama_pro": "LLaMA-Pro (new blocks between the others)",
        "use_dft_loss": "the DFT loss",
        "use_asft_loss": "the ASFT loss",
        "use_eaft_loss": "the EAFT loss",
        "pissa_init": "PiSSA",
        "mixture_of_depths": "a mixture of depths",
        "shift_attn": "shifted short attention (LongLoRA)",
        "rope_scaling": "RoPE scaling other than that of the model's config.json",
        "quantization_device_map": "a device map",
        "use_mca": "Megatron",
        "use_megatron_bridge": "Megatron",
        "megatron_pretrained_checkpoint": "a checkpoint of Megatron",
        "use_hyper_parallel": "HyperParallel",
        "use_kt": "KTransformers",
    }
)
# ... and the keys that only one of them reads.
_READ_BY = {
    "use_galore": "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise",
    "use_apollo": "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
    "apollo_scale_type apollo_layerwise apollo_scale_front",
    "use_badam": "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
    "badam_mask_mode badam_verbose",
    "use_asft_loss": "asft_alpha",
    "use_eaft_loss": "eaft_alpha",
    "pissa_init": "pissa_iter pissa_convert",
    "use_megatron_bridge": "recompute_granularity recompute_method recompute_num_layers mixed_precision "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split bias_activation_fusion "
    "apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm moe_token_dispatcher_type "
    "calculate_per_token_loss use_distributed_optimizer overlap_param_gather overlap_grad_reduce use_packed_sequences "
    "export_hf_on_finish extra_config sequence_parallel",
    "use_hyper_parallel": "hyper_parallel_args hyper_parallel_cp_size",
    "use_kt": "kt_cpu_activation kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path "
    "kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size kt_config",
}
READ_BY = MappingProxyType({key: switch for switch, inner in _READ_BY.items() for key in inner.split()})
OFT = names("module_dropout oft_rank oft_block_size oft_target")
DEGREES = names(
    """
    tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size
    virtual_pipeline_model_parallel_size
    """
)
TOKENS = names("hf_hub_token ms_hub_token om_hub_token swanlab_api_key swanlab_lark_secret")
_INFERENCE = names(
    """
    use_kv_cache infer_dtype infer_backend offload_folder vllm_maxlen vllm_gpu_util vllm_enforce_eager
    vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend
    """
)
_EXPORT = names(
    """
    export_dir export_size export_device export_quantization_bit export_quantization_dataset
    export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id
    """
)
_PROFILER = names(
    """
    profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat
    profiler_record_shapes profiler_profile_memory profiler_with_stack
    """
)
_SWANLAB = names(
    """
    swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_logdir swanlab_lark_webhook_url
    """
)
_MEDIA = names("video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate")
_FUSED = names("flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels")
# As in transformers.py: values that are so here (None: all), and why any other one changes nothing.
SO: Mapping[str, tuple[tuple[Any, ...] | None, str]] = MappingProxyType(
    {
        **dict.fromkeys(_INFERENCE, (None, "only inference reads it")),
        **dict.fromkeys(_EXPORT, (None, "only an export reads it")),
        **dict.fromkeys(_PROFILER, (None, "only enable_torch_profiler reads it")),
        **dict.fromkeys(_SWANLAB, (None, "only use_swanlab reads it")),
        **dict.fromkeys(_MEDIA, (None, "no data set has videos or sounds")),
        **dict.fromkeys(_FUSED, (None, "fast kernels are used where they pass a self-test")),
        **dict.fromkeys(OFT, (None, "only finetuning_type oft reads it")),
        "use_reentrant_gc": (None, "block by block, without reentering autograd"),
        "buffer_size": (None, "only streaming reads it"),
        "overwrite_cache": (None, "tokenized data are kept by their content"),
        "preprocessing_batch_size": ((), "data are prepared in parts of a size of their own"),
        "data_shared_file_system": (None, "one process prepares the data"),
        "eval_num_beams": ((1,), "validation measures the loss"),
        "cache_dir": ((), "models are in the hub's cache"),
        "low_cpu_mem_usage": ((True,), "weights are read slice by slice"),
        "upcast_layernorm": ((False,), "the run's own mixed precision decides"),
        "upcast_lmhead_output": ((False,), "the run's own mixed precision decides"),
        "print_param_status": ((False,), "what a run shows is its own"),
        "include_effective_tokens_per_second": ((), "what a run shows is its own"),
        "fp8_backend": ((), "fp8 is a recipe of our own"),
        "fp8_enable_fsdp_float8_all_gather": ((False,), "fp8 is a recipe of our own"),
        "ray_init_kwargs": ((), "processes are started without Ray"),
        "master_addr": ((), "the launcher's"),
        "master_port": ((), "the launcher's"),
    }
)
FREEZE_PARTS_DEFAULT = MappingProxyType(
    {"freeze_vision_tower": True, "freeze_multi_modal_projector": True, "freeze_language_model": False}
)
IMAGES = frozenset(FREEZE_PARTS_DEFAULT) | names(
    "media_dir image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches"
)
IGNORED = MappingProxyType(
    {
        "compute_accuracy": "validation measures the loss, not the accuracy of tokens",
        "predict_with_generate": "validation measures the loss; `evaluate.prompts` shows answers",
        "enable_torch_profiler": "there is no profiler",
        "profile_modules": "there is no profiler",
    }
)
OF_PREDICTION = names(
    """
    do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
    skip_special_tokens generation_max_length generation_num_beams generation_config sortish_sampler
    """
)
ALL = (
    _MAPPED
    | OF_LORA
    | OF_FREEZE
    | frozenset({"loraplus_lr_ratio"})
    | frozenset(FEATURES)
    | READ_BY.keys()
    | DEGREES
    | TOKENS
    | SO.keys()
    | preferences.LLAMAFACTORY
    | frozenset({"use_swanlab"})
    | IMAGES
    | frozenset(IGNORED)
    | OF_PREDICTION
)
