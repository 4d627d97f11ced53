"""Recipes that train on preferences or rewards (DPO, KTO, ORPO, CPO, PPO, GRPO, reward models, distillation): by which
keys and columns they are known, in files of any tool, so that none of them is trained as something else; and the losses
of those that are trained here, as their tools compute them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from manyhands.config.text import names

if TYPE_CHECKING:
    from manyhands.importers.translation import Translator


NOT_HERE = (
    "training on preferences, rewards or a teacher (DPO, KTO, ORPO, PPO, GRPO, reward models, distillation) is not "
    "read from here; a run file of manyhands trains DPO, IPO, CPO, SimPO and ORPO by `task: preference`, KTO by "
    "`task: kto`; answers that are sampled while a run trains (PPO, GRPO) need TRL, verl or prime-rl"
)
REWARD = (
    "reward models are not available: plan, checks and exports know the vocabulary's head alone; TRL's RewardTrainer "
    "trains them (Axolotl: `reward_model: true`, LLaMA-Factory: `stage: rm`), and `task: preference` trains the model "
    "itself on the same pairs, without one"
)
ONLINE = (
    "it trains on answers that are sampled while it runs, which is not available: use TRL, verl or prime-rl for it; "
    "answers that are collected are trained by DPO or KTO"
)
METHODS = names("dpo ipo kto orpo simpo cpo ppo grpo rl rlhf")
WHICH = (
    "; several of TRL's trainers have this key: add `loss_type: sigmoid` for DPO, `loss_type: kto`, `loss_type: orpo` "
    "or `loss_type: simpo`"
)
ANSWER_ALONE = "the cross-entropy is over the chosen answer, TRL's over prompt and answer"
MEAN = "the loss is a mean over the pairs or answers of a step; there of means of micro-batches, whatever their size"
TOKEN_MEAN = "the cross-entropy is a mean over all tokens of a step's chosen answers, {tool}'s {other}"
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
OF_SEVERAL = names("beta label_smoothing disable_dropout max_prompt_length max_completion_length")
LOSSES = names(
    """
    sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_pair aot_unpaired discopop
    apo_zero apo_down apo_zero_unpaired kto kto_pair bco orpo simpo cpo alphapo grpo dr_grpo dapo bnpo gspo cispo sapo
    luspo vespo
    """
)
ANSWERS = ("messages", "conversations", "text", "completion", "response", "output", "answer", "input_ids")


def are_columns(columns: Collection[str], *, listed: bool) -> bool:
    """Whether rows with these columns are preferences or rewards. ``listed``: the file chose them."""
    has = frozenset(columns)
    if {"prompt", "completion", "label"} <= has:
        return True
    answers = not has.isdisjoint(ANSWERS)
    return not answers and ({"chosen", "rejected"} <= has or (listed and "prompt" in has))


def refuse(t: Translator, keys: Collection[str], columns_key: str = "") -> bool:
    """One refusal for a file with one of ``keys``, their loss, or rows for them. Whether there was one."""
    key = next((key for key in t.values if key in keys), "")
    if not key and str(t.get("loss_type")) in LOSSES:
        key = "loss_type"
    key = key or columns_key
    if not key:
        return False
    for other in t.values:
        if other != key and other in t.known:
            t.ignore(other, f"not looked at, as `{key}` is refused")
    why = REWARD if key == "center_rewards_coefficient" else NOT_HERE
    t.refuse(key, why + WHICH * (t.tool == "TRL" and key in {*OF_SEVERAL, columns_key}))
    return True


WITH_REFERENCE = ("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm")  # TRL's names, and ours


def map_dpo_losses(t: Translator, key: str, weights_key: str, smoothing_key: str) -> None:
    """TRL's ``loss_type`` of DPO: one loss, or one and ``sft`` by ``loss_weights``; which of them smooth labels."""
    asked = t.get(key) if t.has(key) else "sigmoid"
    losses = [str(one) for one in asked] if isinstance(asked, list) else [str(asked)]
    weights = t.get(weights_key) if t.has(weights_key) else [1.0] * len(losses)
    others = [one for one in losses if one != "sft"]
    if len(others) != 1 or others[0] not in WITH_REFERENCE or losses.count("sft") > 1:
        allowed = ", ".join(WITH_REFERENCE)
        t.refuse(key, f"{', '.join(losses)}: allowed is one of {allowed}, alone or with sft")
    elif not isinstance(weights, list) or len(weights) != len(losses) or weights[losses.index(others[0])] != 1:
        t.refuse(weights_key, f"got {weights}, allowed: a number for each loss, 1 for {others[0]}")
    else:
        t.map(key, "preference.loss", others[0])
        if "sft" in losses:
            t.map(weights_key if t.has(weights_key) else key, "preference.sft_weight", weights[losses.index("sft")])
    t.no_op((key, weights_key))
    if others[:1] == ["robust"]:
        t.map(smoothing_key, "preference.label_smoothing", t.number(smoothing_key))
    t.no_op(smoothing_key, "TRL's loss does not read it, only robust does")


def map_sft_weight(t: Translator, key: str, default: float, other: str) -> None:
    """The weight of the chosen answers' cross-entropy, which the tool averages in another way."""
    weight = t.number(key, default)
    t.set_tool_default("preference.sft_weight", weight, f"{t.tool}'s default")
    if weight and t.has(key):
        t.substitute(key, {"preference.sft_weight": weight}, TOKEN_MEAN.format(tool=t.tool, other=other))
    elif t.has(key):
        t.map(key, "preference.sft_weight", weight)


def leave_dropout_out(t: Translator) -> None:
    """TRL and what is built on it switch all dropout off, that of adapters too, unless ``disable_dropout`` is false."""
    method = t.mapping.get("method", {})
    if method.get("dropout") and t.flag("disable_dropout", True):
        method["dropout"] = 0.0
        t.tool_defaults["method.dropout"] = "dropout is switched off in training on preferences, that of adapters too"


# Keys that only one of TRL's trainers of preferences has, and its losses.
_OF_KTO = names("desirable_weight undesirable_weight")
_OF_CPO = names("cpo_alpha simpo_gamma")
_OF_DPO = names(
    "loss_weights use_weighting f_divergence_type f_alpha_divergence_coef ld_alpha rpo_alpha reference_free dpo_alpha"
)
_WITH_REFERENCE = names(
    "precompute_ref_log_probs precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps "
    "force_use_ref_model model_adapter_name ref_adapter_name"
)
_NOT_IN_TRL = {  # value that is so here, and why any other is not
    "sync_ref_model": ((False, None), "the reference stays the model before training: set it to false"),
    "reference_free": ((False, None), "use a loss without a reference (CPO): remove it"),
    "use_weighting": ((False, None), "WPO's weights are not available: remove it"),
    "f_divergence_type": (("reverse_kl", None), "only reverse_kl is available"),
    "ld_alpha": ((None,), "not available: remove it"),
    "dpo_alpha": ((1, 1.0, None), "not available: remove it"),
    "alpha": ((0, 0.0, None), "AlphaPO is not available: remove it"),
    "is_encoder_decoder": ((False, None), "a decoder is trained"),
    "ref_adapter_name": ((None,), "the reference is the model before training: remove it"),
    "model_adapter_name": ((None,), "the trained adapter has no name here: remove it"),
}
_NO_OP = {
    "precompute_ref_batch_size": "the plan decides it",
    "ref_model_mixup_alpha": "only sync_ref_model reads it",
    "ref_model_sync_steps": "only sync_ref_model reads it",
    "f_alpha_divergence_coef": "only another f_divergence_type reads it",
    "force_use_ref_model": "the reference is the model before training",
    "use_logits_to_keep": "only tokens of answers pass the head",
    "label_pad_token_id": "padding is not trained",
    "padding_value": "padding is not trained",
    "generate_during_eval": "`evaluate.prompts` shows answers",
    "discopop_tau": "only the loss discopop reads it",
    "disable_dropout": "",
}


def find_trl_kind(t: Translator) -> str:
    """dpo, kto, cpo or orpo by the keys of a TRL file that only one of these trainers has; "" for any other file, or
    where nothing tells DPO from ORPO: then the refusal names what to write.
    """
    given = {key for key in t.values if t.has(key)}
    losses = t.get("loss_type")
    first = str(losses[0] if isinstance(losses, list) and losses else losses)
    if first not in (*WITH_REFERENCE, "kto", "simpo", "orpo") and t.has("loss_type"):
        return ""
    if given & _OF_KTO or first == "kto":
        return "kto"
    if given & _OF_CPO or first == "simpo":
        return "cpo"
    if first == "orpo":
        return "orpo"
    return "dpo" if given & (_OF_DPO | _WITH_REFERENCE) or t.has("loss_type") else ""


def map_trl(t: Translator, kind: str) -> None:
    """The loss of DPOConfig, KTOConfig, CPOConfig or ORPOConfig of TRL 1.15, in its meaning and defaults."""
    place = next((key for key in ("loss_type", "beta", "output_dir") if t.has(key)), "model_name_or_path")
    task = "kto" if kind == "kto" else "preference"
    t.set_tool_default("task", task, f"the keys are those of {kind.upper()}Config; {MEAN}")
    t.map("beta", "preference.beta", t.number("beta"))
    if kind == "dpo":
        map_dpo_losses(t, "loss_type", "loss_weights", "label_smoothing")
        if t.has("rpo_alpha"):
            map_sft_weight(t, "rpo_alpha", 0.0, "a mean over each micro-batch")
    elif kind == "kto":
        t.only("loss_type", ("kto", None), "of judged answers only kto is available")
        t.map("desirable_weight", "preference.desirable_weight", t.number("desirable_weight"))
        t.map("undesirable_weight", "preference.undesirable_weight", t.number("undesirable_weight"))
        t.substitute(place, {}, "its KL takes the answers of the whole step, TRL's those of a device's micro-batch")
    elif kind == "orpo":
        t.map("loss_type", "preference.loss", "orpo")
        t.set_tool_default("preference.loss", "orpo", "ORPOConfig")
        t.substitute(place, {}, ANSWER_ALONE)
    else:
        loss = "simpo" if t.get("loss_type") == "simpo" else "cpo"
        t.only("loss_type", ("sigmoid", "simpo", None), "of CPO only sigmoid and simpo are available")
        t.set_tool_default("preference.loss", loss, "CPOConfig")
        map_sft_weight(t, "cpo_alpha", 1.0, "a mean over each micro-batch")
        t.map("label_smoothing", "preference.label_smoothing", t.number("label_smoothing"))
        if loss == "simpo":
            t.map("simpo_gamma", "preference.margin", t.number("simpo_gamma"))
        t.no_op("simpo_gamma", "only simpo reads it")
    if t.flag("precompute_ref_log_probs") and kind != "kto":
        t.map("precompute_ref_log_probs", "preference.reference", "stored")
    t.no_op("precompute_ref_log_probs", "" if kind != "kto" else "the reference is the model with its adapters off")
    for key, (so, why) in _NOT_IN_TRL.items():
        t.only(key, so, why)
    for key, why in _NO_OP.items():
        t.no_op(key, why)
    for key in ("max_prompt_length", "max_completion_length", "max_target_length"):
        if t.has(key):
            t.substitute(key, {}, "prompt and answer are bounded together (`max_length`), not each by itself")
        t.no_op(key)
    read = {"beta", "loss_type", "label_smoothing", "max_prompt_length", "max_completion_length", "max_target_length"}
    read |= _OF_KTO | _OF_CPO | _OF_DPO | _WITH_REFERENCE | _NOT_IN_TRL.keys() | _NO_OP.keys()
    for key in (TRL & t.values.keys()) - read:
        t.refuse(key, f"{kind.upper()}Config has no such key: remove it")
    for key in (read & t.values.keys()) - {"disable_dropout"}:
        t.no_op(key)
    for key in ("assistant_only_loss", "completion_only_loss", "packing", "dataset_text_field"):
        t.only(key, (None, False), f"a key of SFTConfig: {kind.upper()}Config has none such")
