"""Which parts of a model of text and images a run loads and trains: vision tower, projector, language model. Pure."""

from __future__ import annotations

from manyhands.config.patterns import matches
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.units import count_of
from manyhands.facts.types import Facts, ModelFacts
from manyhands.planner.layout import ZERO_STAGES
from manyhands.planner.memory.images import memory_by_part, num_units
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.types import PartState, Reason, reason

OUTER_PARTS = ("vision", "projector")  # what leads to the language model's embeddings, in the order of the forward pass


def choose_parts(config: RunConfig, facts: Facts) -> tuple[dict[str, PartState], tuple[Reason, ...]]:
    """The state of each part, {} for a text model. UserError where ``method.parts`` contradicts the model or the data.

    Without images in the training data what they pass through is left out, as nothing would be computed with it. With
    images the tower is frozen, and the projector trained wherever the language model's own weights are.
    """
    asked: dict[str, str] = {part: state for part, state in config.method.parts.items() if state != "auto"}
    if not facts.model.is_multimodal:
        _check_text_model(asked, facts)
        return {}, ()
    language: PartState = "frozen" if asked.get("language") == "frozen" else "trained"
    if not facts.data.num_images:
        _check_without_images(asked)
        if facts.data.num_validation_images:
            raise UserError(
                "the validation data has images, and the training data has none",
                where="data.train",
                why="what images pass through is not loaded for training on text alone",
                fix="add samples with images to the training data, or take the images out of the validation data",
            )
        num_left_out = facts.model.num_tower_parameters
        why = (reason("towers", parameters=num_left_out),) if num_left_out else ()
        return {"vision": "left_out", "projector": "left_out", "language": language}, why
    _check_left_out(asked, facts)
    _check_described(facts.model)
    projector: PartState = "trained" if config.method.name == "full" else "frozen"
    parts: dict[str, PartState] = {
        "vision": "trained" if asked.get("vision") == "trained" else "frozen",
        "projector": {"trained": "trained", "frozen": "frozen"}.get(asked.get("projector", ""), projector),  # type: ignore[dict-item]
        "language": language,
    }
    _check_saved_modules(config, facts.model)
    if "trained" not in parts.values():
        raise UserError(
            "no part of the model is trained",
            where="method.parts",
            why="vision, projector and language are frozen",
            fix="set method.parts.projector: trained, or another part",
        )
    if config.parallel.strategy in ZERO_STAGES:
        raise UserError(
            "DeepSpeed does not train models of text and images here",
            where=f"parallel.strategy: {config.parallel.strategy}",
            why="a rank whose micro-batch has no image would stay out of its collectives",
            fix="use parallel.strategy fsdp, hsdp or ddp",
        )
    return parts, (reason("parts", parts=parts, method=config.method.name),)


def price_images(model: ModelFacts, parts: dict[str, PartState]) -> float:
    """Tokens of text that take as long as one unit of an image: by the parameters that each passes through, forward
    and twice that backward where the tower is trained; its attention is left out."""
    tower = model.tower
    if tower is None or parts.get("vision", "left_out") == "left_out":
        return 0.0
    passes = 3 if parts["vision"] == "trained" else 1
    return tower.patches_per_unit * tower.num_parameters * passes / (3 * model.num_parameters)


def rate_parts(config: RunConfig, model: ModelFacts, parts: dict[str, PartState]) -> dict[str, tuple[str, ...]]:
    """Patterns of the weights of each part that has a learning rate of its own, inner parts first, the language model,
    which is all the rest, last. UserError where such a part is not trained.
    """
    asked = config.optimizer.part_learning_rates
    for part in asked:
        if parts.get(part) != "trained":
            state = f"method.parts.{part} is {parts[part]}" if part in parts else f"{model.name} is a text model"
            raise UserError(
                f"optimizer.part_learning_rates.{part} has nothing to train",
                where=f"optimizer.part_learning_rates.{part}",
                why=state,
                fix=f"train it (method.parts.{part}), or remove the rate" if parts else "set optimizer.learning_rate",
            )
    modules = model.tower.modules if model.tower is not None else {}
    outer = {
        part: modules[part]
        for part in reversed(OUTER_PARTS)
        if parts.get(part) == "trained" and (part in asked or "language" in asked)
    }
    return outer | ({"language": ("*",)} if "language" in asked else {})


def explain_images(s: EstimateInput) -> tuple[Reason, ...]:
    """How many patches a micro-batch has at most, and what the parts that they pass through take of a rank's memory."""
    if s.images is None:
        return ()
    patches = num_units(s) * s.images.tower.patches_per_unit
    return (reason("images", patches=patches, squares=s.images.tower.patches_per_unit, parts=memory_by_part(s)),)


def _check_text_model(asked: dict[str, str], facts: Facts) -> None:
    """UserError for images, or a part that images pass through, where the model reads text alone."""
    model = facts.model
    wrong = [part for part in OUTER_PARTS if asked.get(part, "left_out") != "left_out"]
    if wrong or asked.get("language") == "frozen":
        part = wrong[0] if wrong else "language"
        raise UserError(
            f"method.parts.{part}: {asked[part]} needs a model of text and images",
            where=f"method.parts.{part}",
            why=f"{model.name} ({model.model_type}) is a text model: its config.json has no vision_config",
            fix="remove method.parts, or name a vision-language model",
        )
    if facts.data.num_images:
        raise UserError(
            f"{count_of(facts.data.num_images, 'image')} in the training data, and the model reads text alone",
            where="model.name",
            why=f"{model.name} ({model.model_type}) is a text model: its config.json has no vision_config",
            fix="name a vision-language model, or leave the images out of the data",
        )


def _check_without_images(asked: dict[str, str]) -> None:
    """UserError for a part that nothing would pass through, or nothing trained."""
    for part in OUTER_PARTS:
        if asked.get(part, "left_out") != "left_out":
            raise UserError(
                f"method.parts.{part} is {asked[part]}, but no training sample has an image",
                where=f"method.parts.{part}",
                why="nothing would pass through it",
                fix="use data with images, or set it to auto or left_out",
            )
    if asked.get("language") == "frozen":
        raise UserError(
            "method.parts.language is frozen, and no training sample has an image: nothing would be trained",
            where="method.parts.language",
            fix="use data with images, or set it to auto, full, lora or qlora",
        )


def _check_described(model: ModelFacts) -> None:
    """UserError where nothing is known of what images pass through: its memory could not be planned."""
    if model.tower is None:
        raise UserError(
            f"what images pass through in {model.name} is not known",
            where=model.folder,
            why="config.json leaves out sizes of vision tower and projector, and no weights file here has any of them",
            fix="put the model's safetensors files beside config.json; with model.init: random their headers suffice",
        )


def _check_saved_modules(config: RunConfig, model: ModelFacts) -> None:
    """UserError where tower or projector would be trained behind the back of ``method.parts``."""
    for part, modules in ({} if model.tower is None else model.tower.modules).items():
        for pattern in config.method.modules_to_save:
            if any(matches(module, pattern) for module in modules):
                raise UserError(
                    f"{pattern!r} in method.modules_to_save is the model's {part}",
                    where="method.modules_to_save",
                    why="what images pass through is trained, and saved with the adapter, as one of method.parts",
                    fix=f"set method.parts.{part}: trained, and take {pattern} out of method.modules_to_save",
                )


def _check_left_out(asked: dict[str, str], facts: Facts) -> None:
    for part in OUTER_PARTS:
        if asked.get(part) == "left_out":
            raise UserError(
                f"method.parts.{part} is left_out, but the training data has"
                f" {count_of(facts.data.num_images, 'image')}",
                where=f"method.parts.{part}",
                why="every image passes through vision tower and projector",
                fix="set it to frozen, trained or auto, or leave the images out of the data",
            )
