"""Every key acts: one table from each key of a run file to the check that sees its effect.

A key without an entry fails here, and so does an entry without a key. A check takes a ``Lab``, which makes runs of a
tiny model in this process, and asserts what the key changes in them: rows, losses, learning rates, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from manyhands.config.keys import all_keys
from manyhands.core.errors import UserError
from tests.keys import cluster, guards, images, kernels, left, model, preferences, rows, table, template, training, work
from tests.keys.lab import Lab, open_lab

EFFECTS: dict[str, Callable[[Lab], None]] = {
    "name": left.name,
    "task": rows.task,
    "seed": rows.seed,
    "model.name": model.name,
    "model.revision": model.revision,
    "model.init": model.init,
    "model.dtype": model.dtype,
    "model.master_dtype": model.master_dtype,
    "model.frozen_dtype": model.frozen_dtype,
    "model.chat_template": model.chat_template,
    "model.new_tokens": model.new_tokens,
    "model.special_tokens": model.special_tokens,
    "model.converters": model.converters,
    "model.trust_remote_code": model.trust_remote_code,
    "method.name": model.method,
    "method.parts": model.parts,
    "method.train": model.train,
    "method.freeze": model.freeze,
    "method.rank": model.rank,
    "method.alpha": model.alpha,
    "method.dropout": model.dropout,
    "method.target_modules": model.target_modules,
    "method.rslora": model.rslora,
    "method.dora": model.dora,
    "method.init": model.method_init,
    "method.double_quant": model.double_quant,
    "method.modules_to_save": model.modules_to_save,
    "method.neftune_alpha": model.neftune_alpha,
    "method.adapter": model.adapter,
    "data.train": rows.train,
    "data.validation": rows.validation,
    "data.validation_fraction": rows.validation_fraction,
    "data.format": rows.row_format,
    "data.fields": rows.fields,
    "data.ignore": rows.ignore,
    "data.train_on": template.train_on,
    "data.chat_template_kwargs": template.chat_template_kwargs,
    "data.date": template.date,
    "data.max_samples": rows.max_samples,
    "data.max_length": rows.max_length,
    "data.too_long": rows.too_long,
    "data.min_length": rows.min_length,
    "data.deduplicate": rows.deduplicate,
    "data.order": rows.order,
    "data.packing": rows.packing,
    "data.images": images.images,
    "data.image_folder": images.image_folder,
    "data.image_urls": images.image_urls,
    "data.bad_images": images.bad_images,
    "data.max_image_pixels": images.max_image_pixels,
    "data.shrink_images_above": images.shrink_images_above,
    "data.enlarge_images_below": images.enlarge_images_below,
    "data.image_cache_gb": images.image_cache_gb,
    "data.image_memory_gb": images.image_memory_gb,
    "data.cache_features": images.cache_features,
    "data.feature_cache_gb": images.feature_cache_gb,
    "data.workers": work.workers,
    "data.cache": rows.cache,
    "batch.samples": rows.batch_samples,
    "batch.loss_tokens": rows.batch_loss_tokens,
    "batch.packs": rows.batch_packs,
    "batch.micro_tokens": rows.micro_tokens,
    "optimizer.name": training.optimizer_name,
    "optimizer.learning_rates": training.learning_rates,
    "optimizer.part_learning_rates": training.part_learning_rates,
    "optimizer.decay_embeddings": training.decay_embeddings,
    "optimizer.beta1": training.betas("optimizer.beta1"),
    "optimizer.beta2": training.betas("optimizer.beta2"),
    "optimizer.eps": training.eps,
    "optimizer.max_grad_norm": training.max_grad_norm,
    "moe.balance": model.balance,
    "preference.loss": preferences.loss,
    "preference.reference": preferences.reference,
    "preference.share_prompts": preferences.share_prompts,
    "preference.beta": preferences.beta,
    "preference.label_smoothing": preferences.label_smoothing,
    "preference.margin": preferences.margin,
    "preference.sft_weight": preferences.sft_weight,
    "preference.desirable_weight": preferences.desirable_weight,
    "preference.undesirable_weight": preferences.undesirable_weight,
    "stop.max_tokens": training.max_tokens,
    "stop.max_time_s": training.max_time_s,
    "stop.patience": training.patience,
    "stop.divergence": training.divergence,
    "stop.divergence_factor": training.divergence_factor,
    "stop.divergence_steps": training.divergence_steps,
    "stop.loss_above": training.loss_above,
    "stop.loss_above_steps": training.loss_above,
    "guards.nonfinite": guards.nonfinite,
    "guards.spike": guards.spike,
    "guards.spike_mads": guards.spike_mads,
    "guards.spike_window": guards.spike_window,
    "guards.max_in_a_row": guards.max_in_a_row,
    "guards.leave_out": guards.leave_out,
    "guards.replicas_every": guards.replicas_every,
    "parallel.gpus": work.gpus,
    "parallel.nodes": work.nodes,
    "parallel.device": work.device,
    "parallel.strategy": work.strategy,
    "parallel.shard_degree": work.shard_degree,
    "parallel.context_degree": work.context_degree,
    "parallel.expert_degree": work.expert_degree,
    "parallel.offload": work.offload,
    "parallel.offload_activations": work.offload_activations,
    "parallel.reshard_after_forward": work.reshard_after_forward,
    "parallel.activation_checkpointing": work.activation_checkpointing,
    "parallel.ddp_bucket_mb": work.ddp_bucket_mb,
    "parallel.compile": work.compile_blocks,
    "parallel.timeout_s": work.timeout_s,
    "launch.restarts": work.restarts,
    "launch.min_gpus": work.min_gpus,
    "kernels.lora": kernels.lora,
    "kernels.loss": kernels.loss,
    "kernels.attention": kernels.attention,
    "kernels.linear": kernels.linear,
    "kernels.optimizer": kernels.optimizer,
    "kernels.nf4": kernels.nf4,
    "kernels.deterministic": kernels.deterministic,
    "evaluate.data": left.evaluate_data,
    "evaluate.max_tokens": left.evaluate_tokens,
    "evaluate.prompts": left.prompts,
    "evaluate.max_new_tokens": left.max_new_tokens,
    "checkpoint.hours_between_faults": left.hours_between_faults,
    "checkpoint.asynchronous": left.asynchronous,
    "checkpoint.copy_to": left.copy_to,
    "checkpoint.keep_best": left.keep_best,
    "log.tensorboard": left.tensorboard,
    "log.wandb": left.wandb,
    "log.mlflow": left.mlflow,
    "log.trackio": left.trackio,
    "output.dir": left.output_dir,
    "output.dtype": left.output_dtype,
    "output.merge": left.merge,
    **table.EFFECTS,
    **cluster.EFFECTS,
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened


def test_the_table_holds_every_key_and_nothing_else() -> None:
    keys = set(all_keys())
    assert sorted(keys - EFFECTS.keys()) == [], "keys whose effect no test sees"
    assert sorted(EFFECTS.keys() - keys) == [], "entries that are no keys"


@pytest.mark.ci
@pytest.mark.parametrize("key", EFFECTS)
def test_the_key_acts(key: str, lab: Lab) -> None:
    EFFECTS[key](lab)


@pytest.mark.slow
@pytest.mark.parametrize("key", EFFECTS)
def test_the_check_sees_that_very_key(key: str, lab: Lab) -> None:
    """With the key ignored its check fails: it does not look at something that other keys did."""
    lab.ignored = key
    try:
        with pytest.raises((AssertionError, UserError, pytest.fail.Exception)):
            EFFECTS[key](lab)
    finally:
        lab.ignored = ""
