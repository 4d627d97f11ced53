"""Recipes that train on preferences or rewards (DPO, KTO, ORPO, CPO, PPO, GRPO, reward models, distillation): by which
keys and columns they are known, in files of any tool, so that none of them is trained as something else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from manyhands.config.text import names

if TYPE_CHECKING:
    from manyhands.importers.translation import Translator


NOT_HERE = (
    "training on preferences, rewards or a teacher (DPO, KTO, ORPO, PPO, GRPO, reward models, distillation) is not "
    "read from another tool's file; a run file of manyhands trains DPO, IPO, CPO, SimPO and ORPO: `task: preference`"
)
LLAMAFACTORY = names(
    """
    pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma
    ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model ref_model_adapters
    ref_model_quantization_bit reward_model reward_model_adapters reward_model_quantization_bit reward_model_type
    ld_alpha
    """
)
# No tool has one of these keys for supervised fine-tuning. Of TRL 1.15 and of its older versions.
KEYS = LLAMAFACTORY | names(
    """
    desirable_weight undesirable_weight discopop_tau f_alpha_divergence_coef f_divergence_type loss_weights
    precompute_ref_batch_size precompute_ref_log_probs ref_model ref_model_init_kwargs ref_model_mixup_alpha
    ref_model_sync_steps ref_adapter_name model_adapter_name sync_ref_model reference_free force_use_ref_model
    rpo_alpha cpo_alpha simpo_gamma sft_weight orpo_alpha ld_alpha use_weighting use_logits_to_keep dpo_alpha dpo_beta
    label_pad_token_id generate_during_eval max_prompt_length max_completion_length max_target_length
    center_rewards_coefficient step_separator train_on_last_step_only
    num_generations num_generations_eval num_iterations reward_funcs reward_weights reward_clip_range scale_rewards
    reward_model reward_model_path reward_model_name_or_path reward_model_adapters reward_model_type
    reward_processing_classes epsilon_high steps_per_generation generation_batch_size mask_truncated_completions
    normalize_advantages importance_sampling_level top_entropy_quantile log_completions num_completions_to_print
    log_unique_prompts use_vllm use_transformers_paged vllm_mode vllm_server_host vllm_server_port
    vllm_server_base_url vllm_server_timeout vllm_gpu_memory_utilization vllm_tensor_parallel_size
    vllm_max_model_length vllm_max_model_len vllm_device vllm_dtype vllm_importance_sampling_correction
    ds3_gather_for_generation
    num_ppo_epochs ppo_epochs kl_coef init_kl_coef adap_kl_ctrl target_kl kl_estimator cliprange cliprange_value
    vf_coef whiten_rewards missing_eos_penalty num_mini_batches local_rollout_forward_batch_size
    num_sample_generations total_episodes stop_token_id sft_model_path value_model_path rloo_k
    min_density_ratio max_density_ratio prompt_sample_size tpo_alpha tpo_l_gamma
    teacher_model_name_or_path teacher_model_init_kwargs teacher_model_revision seq_kd lmbda
    """
)
# In a file of TRL these are as clear: its SFTConfig has none of them, and no other key of that name.
TRL = (KEYS - names("pref_beta pref_ftx pref_bco_weight pref_loss")) | names(
    """
    beta label_smoothing disable_dropout alpha gamma lam epsilon delta temperature top_p top_k min_p response_length
    repetition_penalty generation_kwargs cache_implementation padding_value is_encoder_decoder max_new_tokens
    entropy_coef
    """
)
LOSSES = names(
    """
    sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_pair aot_unpaired discopop
    apo_zero apo_down apo_zero_unpaired kto kto_pair bco orpo simpo cpo alphapo grpo dr_grpo dapo bnpo gspo cispo sapo
    luspo vespo
    """
)
ANSWERS = ("messages", "conversations", "text", "completion", "response", "output", "answer", "input_ids")


def are_columns(columns: Collection[str], *, listed: bool) -> bool:
    """Whether rows with these columns are for preferences or rewards. ``listed``: the file itself chose them, so that
    a prompt alone has no answer elsewhere in the row.
    """
    has = frozenset(columns)
    if {"prompt", "completion", "label"} <= has:
        return True
    answers = not has.isdisjoint(ANSWERS)
    return not answers and ({"chosen", "rejected"} <= has or (listed and "prompt" in has))


def refuse(t: Translator, keys: Collection[str], columns_key: str = "") -> bool:
    """One refusal for a file with one of ``keys``, with a loss of theirs, or whose ``columns_key`` names rows for them;
    its other keys are left alone. Whether there was one.
    """
    key = next((key for key in t.values if key in keys), "")
    if not key and str(t.get("loss_type")) in LOSSES:
        key = "loss_type"
    key = key or columns_key
    if not key:
        return False
    for other in t.values:
        if other != key and other in t.known:
            t.ignore(other, f"not looked at, as `{key}` is refused")
    t.refuse(key, NOT_HERE)
    return True
