"""What a plan warns of although it can be carried out: values that hardly anybody means. Pure."""

from __future__ import annotations

from manyhands.config.patterns import matches
from manyhands.config.schema import RunConfig
from manyhands.facts.types import ModelFacts

ABSURD_RATE = 1.0  # an update of Adam, Adafactor or Muon has about the size of the learning rate, weights are mostly far below 1


def warn_of_values(config: RunConfig, model: ModelFacts, learning_rate: float) -> tuple[str, ...]:
    """One sentence for each learning rate and LoRA rank that cannot be meant."""
    rates = {"optimizer.learning_rate": learning_rate}
    rates |= {f"optimizer.learning_rates, {pattern}": rate for pattern, rate in config.optimizer.learning_rates.items()}
    absurd = [
        f"warning: {key}: {rate:g} moves a weight by about that much in each step, more than most weights are; 1e-5 to 1e-3 are usual"
        for key, rate in rates.items()
        if rate >= ABSURD_RATE
    ]
    return (*absurd, *_warn_of_rank(config, model))


def _warn_of_rank(config: RunConfig, model: ModelFacts) -> tuple[str, ...]:
    """LoRA factors of rank r hold ``r (in + out)`` values; from the layer's smaller width on they add nothing that it has not itself."""
    method = config.method
    if not method.trains_adapters:
        return ()
    patterns = ("*",) if method.targets == "all-linear" else method.targets
    narrow = [
        f"{name.rpartition('.')[2]} ({min(shape)})"
        for name, shape in model.block_linear_shapes.items()
        if method.rank >= min(shape) and any(matches(f"{model.decoder}.layers.0.{name}", pattern) for pattern in patterns)
    ]
    if not narrow:
        return ()
    return (
        f"warning: method.rank: {method.rank} is not below the width of {', '.join(narrow)}: such factors are larger than they need be",
    )
