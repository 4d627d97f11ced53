"""What a config leaves to model and adapter and that needs no search: whether samples are packed, which modules are
adapted, how 4-bit weights are held. Pure.
"""

from __future__ import annotations

from manyhands import families
from manyhands.config.schema import MethodSection, RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts, ModelFacts
from manyhands.planner.types import Reason, reason


def settle(config: RunConfig, facts: Facts) -> tuple[RunConfig, tuple[Reason, ...]]:
    """The config with packing decided, with the method of the adapter that the run continues, and with target modules
    by name.
    """
    packing, why_packing = choose_packing(config, facts.model)
    method = config.method if facts.adapter is None else facts.adapter.method
    method, why_targets = name_targets(follow_stored(config, method, facts.model), facts.model)
    data = config.data.model_copy(update={"packing": packing})
    return config.model_copy(update={"data": data, "method": method}), (why_packing, *why_targets)


def choose_packing(config: RunConfig, model: ModelFacts) -> tuple[bool, Reason]:
    """Rows side by side where the model allows it. UserError where that was asked for and the model does not."""
    asked = config.data.packing
    if asked is False:
        return False, reason("packing", packed=False, asked=True, known="")
    if model.packs:
        return True, reason("packing", packed=True, asked=asked is True, known=model.packing_reason)
    batch = config.batch
    needing = [
        f"batch.{name}" for name in ("loss_tokens", "micro_tokens") if getattr(batch, name) not in (None, "auto")
    ]
    if asked is True or needing:
        key = "data.packing" if asked is True else needing[0]
        raise UserError(
            f"{key} requires packed samples, but {model.model_type} cannot be packed",
            where=key,
            why=model.packing_reason,
            fix="set data.packing=false (one sample per batch row)"
            + "".join(f", and remove {name}" for name in needing),
        )
    return False, reason("packing", packed=False, asked=False, known=model.packing_reason)


def follow_stored(config: RunConfig, method: MethodSection, model: ModelFacts) -> MethodSection:
    """``method`` with double quantization as the base's weights have it, if these are stored in NF4. UserError for what
    needs other weights.
    """
    stored = model.stored_nf4
    if stored is None:
        return method
    wrong = {
        f"method.name: {method.name}": (method.name != "qlora", "set method.name: qlora"),
        "method.init: loftq": (
            method.init == "loftq",
            "remove it: the files do not have the weights before quantization",
        ),
        "output.merge: true": (config.output.merge, "remove it; PEFT merges the adapter into the model in 16 bits"),
        "method.double_quant: false": (stored.double_quant > method.double_quant, "remove it: the files decide"),
    }
    for key, (is_set, fix) in wrong.items():
        if is_set:
            raise UserError(
                f"{key} cannot be combined with a model whose weights are stored in NF4",
                where=key.partition(":")[0],
                why=f"{model.folder} holds 4-bit weights of bitsandbytes, which are used unchanged",
                fix=f"{fix}, or use the model's version that is not quantized",
            )
    return method.model_copy(update={"double_quant": stored.double_quant})


def name_targets(method: MethodSection, model: ModelFacts) -> tuple[MethodSection, tuple[Reason, ...]]:
    """``method`` with PEFT's default target modules by name. UserError where PEFT has none for models of this type."""
    if method.target_modules != "peft-default":
        return method, ()
    names = families.find(model.model_type).peft_targets
    if not names:
        raise UserError(
            f"method.target_modules: peft-default has no layers for {model.model_type}",
            where="method.target_modules",
            why="PEFT has no default for models of this type, or it is not in manyhands' table",
            fix="name layers, such as [q_proj, v_proj], or use all-linear",
            details=list(model.block_linear_shapes),
        )
    return method.model_copy(update={"target_modules": names}), (reason("targets", names=names, kind=model.model_type),)
