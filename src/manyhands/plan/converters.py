"""Which converters change the model, and in which order. Pure; ``convert/build.py`` says where each one is.

The order is that of the changes: what is left out, how weights are held and multiplied, what is trained beside them,
with which first values, and then what computes faster with all of these in place.
"""

from __future__ import annotations

from typing import Literal

from manyhands.config.schema import RunConfig

# How a run is carried out, and first values: not needed where a trained checkpoint is opened.
ONLY_WHILE_TRAINING = ("fp8", "adapter", "loftq", "fused_modules", "attention_kernels", "fused_loss")


def choose_converters(
    config: RunConfig,
    *,
    device: Literal["cuda", "cpu"],
    attention: str,
    has_towers: bool = False,
    has_new_tokens: bool = False,
    continues_adapter: bool = False,
) -> tuple[str, ...]:
    """The names, in order. ``kernels.*: auto`` tries fast paths on GPUs; each passes a check there before it runs.

    ``attention``: the plan's. ``continues_adapter``: the run starts from the values of an adapter.
    """
    asked, method = config.kernels, config.method
    gpu, adapters, fp8 = device == "cuda", method.trains_adapters, asked.linear == "fp8"
    fuses = asked.lora == "fused" or (asked.lora == "auto" and gpu)
    wanted = {
        "text_only": has_towers,
        "nf4": method.name == "qlora",
        "fp8": fp8,
        "lora": adapters,
        "patterns": method.name == "patterns",
        "new_tokens": has_new_tokens and adapters,
        "adapter": continues_adapter,
        "loftq": method.name == "qlora" and method.init == "loftq",
        "fused_modules": fuses if adapters else fp8 and method.name == "full",
        "attention_kernels": asked.attention == "auto" and attention == "varlen",
        "fused_loss": asked.loss == "fused" or (asked.loss == "auto" and gpu),
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)
