"""The schema of ``method``: which weights a run trains, and how. Knows no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from manyhands.config.data_schema import Fraction, PositiveInt, Section

PartName = Literal["vision", "projector", "language"]  # of a model of text and images


class MethodSection(Section):
    """Which weights are trained, and how."""

    name: Literal["full", "lora", "qlora", "patterns"] = Field(
        "lora",
        description="`full` trains all weights, `lora` low-rank adapters on frozen weights, `qlora` the same on 4-bit "
        "(NF4) weights, `patterns` the weights selected by `train` and `freeze`.",
    )
    parts: dict[PartName, Literal["auto", "left_out", "frozen", "trained", "full", "lora", "qlora"]] = Field(
        {},
        description="Parts of a model of text and images, such as {projector: trained, vision: frozen, language: "
        "lora}. `vision` and `projector` are left_out, frozen or trained; `language` is frozen, or what `name` is. "
        "auto: vision and projector are left out where no sample has an image, else vision is frozen, and the "
        "projector trained with full and frozen with lora and qlora.",
    )
    train: tuple[str, ...] = Field(
        (),
        description="patterns: weights to train, by name, glob pattern, slice (`layers[-2:]`: the last two) or `re:` "
        "expression; all if empty.",
    )
    freeze: tuple[str, ...] = Field((), description="patterns: weights to freeze; takes precedence over `train`.")
    rank: PositiveInt = Field(16, description="LoRA: rank r of the matrices A and B.")
    alpha: float = Field(32.0, gt=0, description="LoRA: the update is scaled by alpha / rank.")
    dropout: Fraction = Field(0.0, description="LoRA: dropout probability of the adapter's input.")
    target_modules: Literal["all-linear", "peft-default"] | tuple[str, ...] = Field(
        "all-linear",
        description="LoRA: modules by name, glob or `re:` expression; `all-linear`: all linear layers of the blocks; "
        "`peft-default`: those that PEFT adapts in models of this type if none are named.",
    )
    rslora: bool = Field(False, description="LoRA: scale by alpha / sqrt(rank) instead of alpha / rank.")
    dora: bool = Field(False, description="LoRA: train magnitude and direction of the weights separately (DoRA).")
    init: Literal["zero", "loftq"] = Field(
        "zero",
        description="qlora: initial LoRA matrices: B is zero, or A and B approximate the NF4 quantization error "
        "(loftq; the adapter then needs the same 4-bit weights).",
    )
    double_quant: bool = Field(
        True,
        description="qlora: quantize the scales of the 4-bit weights too (4.13 bits a weight), or keep them in float32 "
        "(4.5 bits; bitsandbytes' own default).",
    )
    modules_to_save: tuple[str, ...] = Field(
        (),
        description="LoRA: modules that are fully trained and saved with the adapter, such as lm_head.",
    )
    adapter: str | None = Field(
        None, description="LoRA: continue from this PEFT adapter, or from a finished run's folder."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_by_language(cls, values: Any) -> Any:
        """``parts.language`` is the method where ``name`` is not given: `full` where other parts alone are trained."""
        parts = values.get("parts") if isinstance(values, dict) else None
        language = parts.get("language") if isinstance(parts, dict) else None
        if language in ("frozen", "full", "lora", "qlora") and "name" not in values:
            return {**values, "name": "full" if language == "frozen" else language}
        return values

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained on frozen weights; otherwise the model's own weights, and a model is saved."""
        return self.name in ("lora", "qlora")
