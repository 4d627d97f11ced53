"""Model families, one file each: what config.json does not tell of a family.

A new family is one file here with a tuple ``FAMILIES``. Nothing outside this package names a family or a class of its
implementation. Imports no torch and no transformers, and nothing of the product.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from manyhands.families.family import (
    IMAGE_TOKEN_FIELDS,
    NUM_EXPERTS,
    Config,
    Experts,
    Family,
    ImageLayout,
    KnownModule,
    MixerKernel,
    block_shapes,
    config_of_block,
    expert_groups,
    experts_per_token,
    head_dim,
    infer_images,
    is_tied,
    norm_shapes,
    num_experts,
    num_heads,
    routes,
)
from manyhands.families.refused import EXPERTS_REFUSED, IMAGES_REFUSED, STRUCTURE_REFUSED

__all__ = [
    "IMAGES_REFUSED",
    "NUM_EXPERTS",
    "Experts",
    "Family",
    "ImageLayout",
    "KnownModule",
    "MixerKernel",
    "block_shapes",
    "bypassed_linears",
    "config_of_block",
    "expert_groups",
    "experts_per_token",
    "find",
    "head_dim",
    "is_tied",
    "known_modules",
    "measured_types",
    "mixer_kernels",
    "norm_shapes",
    "num_experts",
    "num_heads",
    "routes",
    "stateful_mixers",
    "types_with_images",
    "weighing_inputs",
    "why_no_experts",
    "why_no_images",
    "why_no_training",
]

MEASURED_WITH = "5.17."  # the transformers with which ``packs`` was measured (docs/equality.md)
EXAMPLES = "Llama, Qwen3, Mistral or Gemma 3"  # for messages that ask for another model
EXPERT_EXAMPLES = "Qwen3-MoE, OLMoE, Mixtral, GLM-4.5 or DeepSeek-V3"
UNKNOWN = Family(name="unknown", model_types=())
"""What a family without a file is taken for: Llama's structure, its packing not measured."""


def _read_files() -> tuple[Family, ...]:
    others = ("family", "images", "refused")
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in others)
    return tuple(family for name in names for family in import_module(f"{__name__}.{name}").FAMILIES)


FAMILIES = _read_files()


def find(config: Config | str) -> Family:
    """The family of a config.json, or of a ``model_type``; ``UNKNOWN`` where no file describes it.

    Where a whole config.json is given and ``IMAGES_REFUSED`` does not name its type, images of an unknown family are
    inferred from it. Of a multimodal model's config.json the family around its text: ask for the text's own with the
    text's config.
    """
    model_type = str(config if isinstance(config, str) else config.get("model_type"))
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    if isinstance(config, str) or model_type in IMAGES_REFUSED:
        return UNKNOWN
    images = infer_images(config)
    return UNKNOWN if images is None else replace(UNKNOWN, images=images)


def why_no_images(config: Config) -> str:
    """Why a model with this config.json cannot be trained on images."""
    if reason := IMAGES_REFUSED.get(str(config.get("model_type"))):
        return reason
    if not isinstance(config.get("vision_config"), dict):
        return "it takes text alone"
    return f"its config.json has neither {' nor '.join(IMAGE_TOKEN_FIELDS)}, in whose place images go"


def why_no_experts(config: Config) -> str:
    """Why a mixture of experts with this config.json cannot be trained; "" where it can."""
    model_type = str(config.get("model_type"))
    if find(model_type).experts is not None:
        return ""
    return EXPERTS_REFUSED.get(model_type, "its experts have not been tried")


def why_no_training(config: Config) -> str:
    """Why a text model with this config.json cannot be trained, experts aside; "" where it can."""
    return STRUCTURE_REFUSED.get(str(config.get("model_type")), "")


def known_modules() -> dict[str, KnownModule]:
    """Module classes that may be replaced by fused ones, by name. A family may use another's."""
    return {module.name: _describe(module, family) for family in FAMILIES for module in family.known_modules}


@cache
def bypassed_linears() -> tuple[str, ...]:
    """Linear layers of blocks, by the end of their names, whose weights are read without their forward pass."""
    return tuple(name for family in FAMILIES for name in family.bypassed)


@cache
def weighing_inputs() -> frozenset[str]:
    """Classes of experts whose inputs a router's scores weigh, by name."""
    return frozenset(family.experts.weighs_inputs for family in FAMILIES if family.experts is not None) - {""}


@cache
def stateful_mixers() -> frozenset[str]:
    """Classes of modules that carry a state along a row, from token to token, by name."""
    return frozenset(name for family in FAMILIES for name in family.mixers)


@cache
def mixer_kernels(mixer: str) -> tuple[MixerKernel, ...]:
    """The kernels that keep documents of a pack apart in mixers of this class; () where none do."""
    return next((family.kernels for family in FAMILIES if mixer in family.mixers), ())


def _describe(module: KnownModule, family: Family) -> KnownModule:
    parent = {"attention": "self_attn.", "mlp": "mlp."}[module.kind]
    merged = (name.removeprefix(parent) for name in family.merged if name.startswith(parent))
    return replace(module, norms_all_heads=family.qk_norm == "all heads", merged=next(merged, ""))


def types_with_images() -> tuple[str, ...]:
    """Model types that can be trained on images."""
    return tuple(model_type for family in FAMILIES if family.images for model_type in family.model_types)


def measured_types(*, multimodal: bool = False) -> tuple[str, ...]:
    """Model types whose packing was measured, of text alone or of models around one."""
    return tuple(
        model_type
        for family in FAMILIES
        if family.packs and family.is_multimodal is multimodal
        for model_type in family.model_types
    )


def was_measured(family: Family) -> bool:
    """Whether ``family.packs`` is known for the transformers that is installed."""
    return bool(family.packs) and installed_version("transformers").startswith(MEASURED_WITH)


def installed_version(package: str) -> str:
    """The version of an installed distribution, "" where there is none; nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
