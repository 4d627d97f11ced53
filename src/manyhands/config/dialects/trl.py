"""TRL's ``trl sft --config FILE``: the keys of SFTConfig, ModelConfig and ScriptArguments (TRL 1.x)."""

from __future__ import annotations

from manyhands.config.dialects import transformers as hf
from manyhands.config.dialects.translation import Translator, names

TOOL = "TRL"
REFUSES_UNKNOWN = True
MARKS = frozenset({"dataset_name", "dataset_mixture", "datasets", "use_peft", "assistant_only_loss"})
OPEN = hf.OPEN | {"dataset_kwargs", "model_init_kwargs"}
KEYS = hf.KEYS | names(
    """
    model_name_or_path model_revision dataset_name dataset_train_split dataset_test_split dataset_config max_length
    packing use_peft lora_r lora_alpha lora_dropout dataset_mixture datasets assistant_only_loss
    """
)


def translate(t: Translator) -> None:
    """Every key of a TRL file; columns of the data decide what is trained, as in TRL."""
    t.map("model_name_or_path", "model.name")
    t.map("model_revision", "model.revision")
    _map_data(t)
    _map_method(t)
    hf.map_bystanders(t)
    hf.map_optimizer(t)
    if not t.has("learning_rate"):
        t.carry("optimizer.learning_rate", 2e-5, "TRL's default")
    hf.map_schedule(t, default="linear")
    hf.map_length(t, epochs=3)
    hf.map_batch(t, per_device=8)
    hf.map_precision(t)
    hf.map_intervals(t, save_steps=500)
    hf.map_sharding(t)
    if t.has("output_dir"):
        folder, _, name = str(t.get("output_dir")).rstrip("/").rpartition("/")
        t.map("output_dir", {"output.dir": folder or ".", "name": name})


def _map_data(t: Translator) -> None:
    if t.has("dataset_name"):
        source = {"path": f"hub:{t.get('dataset_name')}"}
        for key, inner in (("dataset_config", "subset"), ("dataset_train_split", "split")):
            if t.has(key):
                source[inner] = str(t.get(key))
                t.map(key, {})
        t.map("dataset_name", "data.train", [source])
    t.already("dataset_test_split", "without an evaluation nothing is held out")
    t.carry("data.validation_fraction", 0, "TRL holds nothing out")
    length = t.integer("max_length")
    if length:
        t.map("max_length", "data.max_length", length)
    else:
        t.carry("data.max_length", 1024, "TRL's default")
    t.carry("data.too_long", "truncate", "TRL cuts the end off")
    if t.flag("assistant_only_loss"):
        t.map("assistant_only_loss", "data.train_on", "assistant")
    else:
        t.carry("data.train_on", "all", "TRL trains all tokens of messages")
        t.already("assistant_only_loss")


def _map_method(t: Translator) -> None:
    if not t.flag("use_peft"):
        t.carry("method.name", "full", "without `use_peft` all weights are trained")
        t.already("use_peft")
        return
    t.map("use_peft", "method.name", "lora")
    for key, native, default in (
        ("lora_r", "rank", 16),
        ("lora_alpha", "alpha", 32),
        ("lora_dropout", "dropout", 0.05),
    ):
        number = t.number(key)
        if number is None:
            t.carry(f"method.{native}", default, "TRL's default")
        else:
            t.map(key, f"method.{native}", number)
