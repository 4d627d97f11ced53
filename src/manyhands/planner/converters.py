"""Every converter: one entry each, which says where it is and when a plan names it. ``convert/build.py`` makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.config.schema import KernelsSection, MethodSection, RunConfig
from manyhands.planner.layout import Device


@dataclass(frozen=True)
class Case:
    """What a plan chooses converters by. ``attention``: the plan's."""

    config: RunConfig
    device: Device
    attention: str
    has_towers: bool = False
    has_groups: bool = False
    has_mxfp4: bool = False
    has_new_tokens: bool = False
    continues_adapter: bool = False  # the run starts from the values of an adapter

    @property
    def method(self) -> MethodSection:
        return self.config.method

    @property
    def kernels(self) -> KernelsSection:
        return self.config.kernels

    @property
    def tries_kernels(self) -> bool:
        """Whether ``kernels.*: auto`` tries a fast path; not under ZeRO 3, whose weights are there only while their own
        module computes.
        """
        return self.device == "cuda" and self.config.parallel.strategy != "zero3"

    @property
    def fuses_modules(self) -> bool:
        if not self.method.trains_adapters:
            return self.kernels.linear == "fp8" and self.method.name == "full"
        return self.kernels.lora == "fused" or (self.kernels.lora == "auto" and self.tries_kernels)


@dataclass(frozen=True)
class ConverterSpec:
    """``place``: its ``module:Class``. ``only_while_training``: how a run is carried out, or first values, which
    nothing needs where a trained checkpoint is opened.
    """

    place: str
    applies: Callable[[Case], bool]
    only_while_training: bool = False


# In the order in which they change the model.
CONVERTERS = {
    "parts": ConverterSpec("manyhands.convert.parts:ModalityParts", lambda case: case.has_towers),
    "experts": ConverterSpec("manyhands.convert.experts:Experts", lambda case: case.has_groups),
    "mxfp4": ConverterSpec("manyhands.convert.mxfp4:Mxfp4Experts", lambda case: case.has_mxfp4),
    "nf4": ConverterSpec("manyhands.convert.nf4:Nf4Blocks", lambda case: case.method.name == "qlora"),
    "fp8_weights": ConverterSpec(
        "manyhands.convert.fp8:Fp8Weights",
        lambda case: case.config.model.frozen_dtype == "fp8",
        only_while_training=True,
    ),
    "fp8": ConverterSpec(
        "manyhands.convert.fp8:Fp8Blocks",
        lambda case: case.kernels.linear == "fp8",
        only_while_training=True,
    ),
    "lora": ConverterSpec("manyhands.convert.lora:Lora", lambda case: case.method.trains_adapters),
    "patterns": ConverterSpec(
        "manyhands.convert.trainable:TrainedPatterns", lambda case: case.method.name == "patterns"
    ),
    "new_tokens": ConverterSpec(
        "manyhands.convert.new_tokens:TrainedTokens", lambda case: case.has_new_tokens and case.method.trains_adapters
    ),
    "adapter": ConverterSpec(
        "manyhands.convert.adapter:StartingAdapter", lambda case: case.continues_adapter, only_while_training=True
    ),
    "loftq": ConverterSpec(
        "manyhands.convert.loftq:LoftQ",
        lambda case: case.method.name == "qlora" and case.method.init == "loftq",
        only_while_training=True,
    ),
    "neftune": ConverterSpec(
        "manyhands.convert.neftune:Neftune", lambda case: case.method.neftune_alpha > 0, only_while_training=True
    ),
    "fused_modules": ConverterSpec(
        "manyhands.convert.fused_modules:FusedModules", lambda case: case.fuses_modules, only_while_training=True
    ),
    "attention_kernels": ConverterSpec(
        "manyhands.convert.attention_kernels:FastAttention",
        lambda case: case.kernels.attention == "auto" and case.attention == "varlen",
        only_while_training=True,
    ),
    "fused_loss": ConverterSpec(
        "manyhands.convert.fused_loss:FusedLoss",
        lambda case: case.kernels.loss == "fused" or (case.kernels.loss == "auto" and case.tries_kernels),
        only_while_training=True,
    ),
}


def choose_converters(case: Case) -> tuple[str, ...]:
    """Their names, in order, and after them the user's own, as ``module:Class``."""
    return (*(name for name, spec in CONVERTERS.items() if spec.applies(case)), *case.config.model.converters)
