"""Every key acts: one table from each key of a run file to the check that sees its effect.

A key without an entry fails here, and so does an entry without a key. A check takes a ``Lab``, which makes runs of a
tiny model in this process, and asserts what the key changes in them: rows, losses, learning rates, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from manyhands.config.keys import all_keys
from manyhands.core.errors import UserError
from tests.keys import cluster, guards, images, kernels, left, model, preferences, rows, table, template, training, work
from tests.keys.lab import Lab, open_lab


def effects(section: str, checks: ModuleType, names: str) -> dict[str, Callable[[Lab], None]]:
    """The checks of keys of a section that are named as the keys are."""
    return {f"{section}.{name}": getattr(checks, name) for name in names.split()}


EFFECTS: dict[str, Callable[[Lab], None]] = {
    "name": left.name,
    "task": rows.task,
    "seed": rows.seed,
    "method.name": model.method,
    "method.init": model.method_init,
    "data.format": rows.row_format,
    "data.workers": work.workers,
    "batch.samples": rows.batch_samples,
    "batch.loss_tokens": rows.batch_loss_tokens,
    "batch.packs": rows.batch_packs,
    "batch.micro_tokens": rows.micro_tokens,
    "optimizer.name": training.optimizer_name,
    "optimizer.beta1": training.betas("optimizer.beta1"),
    "optimizer.beta2": training.betas("optimizer.beta2"),
    "moe.balance": model.balance,
    "stop.loss_above_steps": training.loss_above,
    "parallel.compile": work.compile_blocks,
    "launch.restarts": work.restarts,
    "launch.min_gpus": work.min_gpus,
    "evaluate.data": left.evaluate_data,
    "evaluate.max_tokens": left.evaluate_tokens,
    "evaluate.prompts": left.prompts,
    "evaluate.max_new_tokens": left.max_new_tokens,
    "output.dir": left.output_dir,
    "output.dtype": left.output_dtype,
    "output.merge": left.merge,
    **effects(
        "model",
        model,
        """
        name revision init dtype master_dtype frozen_dtype chat_template new_tokens special_tokens converters
        trust_remote_code
        """,
    ),
    **effects(
        "method",
        model,
        """
        parts train freeze rank alpha dropout target_modules rslora dora double_quant modules_to_save
        neftune_alpha adapter
        """,
    ),
    **effects(
        "data",
        rows,
        """
        train validation validation_fraction fields ignore max_samples max_length too_long min_length deduplicate
        order packing cache
        """,
    ),
    **effects("data", template, "train_on chat_template_kwargs date"),
    **effects(
        "data",
        images,
        """
        images image_folder image_urls bad_images max_image_pixels shrink_images_above enlarge_images_below
        image_cache_gb image_memory_gb cache_features feature_cache_gb
        """,
    ),
    **effects("optimizer", training, "learning_rates part_learning_rates decay_embeddings eps max_grad_norm"),
    **effects(
        "preference",
        preferences,
        """
        loss reference share_prompts beta label_smoothing margin sft_weight desirable_weight undesirable_weight
        """,
    ),
    **effects(
        "stop",
        training,
        """
        max_tokens max_time_s patience divergence divergence_factor divergence_steps loss_above
        """,
    ),
    **effects("guards", guards, "nonfinite spike spike_mads spike_window max_in_a_row leave_out replicas_every"),
    **effects(
        "parallel",
        work,
        """
        gpus nodes device strategy shard_degree context_degree expert_degree offload offload_activations
        reshard_after_forward activation_checkpointing ddp_bucket_mb cuda_graphs timeout_s
        """,
    ),
    **effects("kernels", kernels, "lora loss attention linear optimizer nf4 deterministic"),
    **effects("checkpoint", left, "hours_between_faults asynchronous copy_to keep_best"),
    **effects("log", left, "tensorboard wandb mlflow trackio"),
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
