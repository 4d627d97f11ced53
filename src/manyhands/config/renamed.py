"""Keys and values that had another name before: old name to new name. They are refused, never read.

One table, so that a run file of an earlier version is corrected from its error messages alone.
"""

from __future__ import annotations

from types import MappingProxyType

RENAMED_KEYS = MappingProxyType(
    {
        "batch.rows": "batch.samples",
        "batch.tokens": "batch.loss_tokens",
        "batch.micro_rows": "batch.micro_samples",
        "data.max_rows": "data.max_samples",
        "data.template_arguments": "data.chat_template_kwargs",
        "evaluate.samples": "evaluate.prompts",
        "method.targets": "method.target_modules",
        "model.masters": "model.master_dtype",
        "parallel.recompute": "parallel.activation_checkpointing",
        "parallel.reshard": "parallel.reshard_after_forward",
        "parallel.shard_ranks": "parallel.shard_degree",
    }
)
# Of one source in a list of sources (data.train).
RENAMED_SOURCE_KEYS = MappingProxyType({"max_rows": "max_samples"})

# By the key's new name: old value to new value.
RENAMED_VALUES = MappingProxyType(
    {
        "data.too_long": {"refuse": "error"},
        "kernels.attention": {"plain": "reference"},
        "kernels.linear": {"plain": "compute_dtype"},
        "kernels.lora": {"plain": "reference"},
        "kernels.loss": {"plain": "reference"},
        "kernels.nf4": {"plain": "reference"},
        "kernels.optimizer": {"plain": "reference"},
        "parallel.activation_checkpointing": {"block": "full"},
        "parallel.strategy": {"one": "single", "hybrid": "hsdp"},
        "stop.divergence": {"end": "fail"},
    }
)


def describe_renamed_key(path: str, value: object = None) -> str | None:
    """What an old key, or an entry of one, is called now: ``renamed to `batch.samples```. Its value too if that is
    renamed."""
    old = next((old for old in RENAMED_KEYS if f"{path}.".startswith(f"{old}.")), None)
    if old is None:
        return None
    new = RENAMED_KEYS[old] + path.removeprefix(old)
    new_value = RENAMED_VALUES.get(new, {}).get(value) if isinstance(value, str) else None
    return f"renamed to `{new}`" + (f", and {value} to {new_value}" if new_value else "")


def describe_renamed_value(path: str, value: object) -> str | None:
    """What an old value of a key is called now: ``renamed to hsdp``."""
    new = RENAMED_VALUES.get(path, {}).get(value) if isinstance(value, str) else None
    return new and f"renamed to {new}"
