"""What is said of a family is transformers' own, and nothing outside ``families/`` knows one by name."""

from __future__ import annotations

import importlib
import inspect
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest
import torch

import manyhands
from manyhands import families
from manyhands.families import FAMILIES, UNKNOWN, find
from manyhands.families.images import PIXELS

SOURCES = Path(manyhands.__file__).parent
# Files that name a family for another reason, and the reason.
EXEMPT = {
    "config/named_templates.py": "chat formats are named after the models that use them",
    "data/chat/template.py": "names one of these chat formats as an example",
    "data/chat/tekken.py": "mistral-common is a library, and its files are read",
    "data/tokenize/tokenizer.py": "the same",
    "infer/serve.py": "names a kind of tool calls as an example",
    "config/schema.py": "lists the names of these chat formats",
    "bench/rows.py": "published models that are measured",
    "bench/shapes.py": "shapes of published models that are measured",
    "demo/model.py": "the demo's model",
    "core/secret_values.py": "names a provider of keys",
    "facts/hub.py": "the demo's model",
    "cli/init.py": "the demo's model",
    "cli/config.py": "LLaMA-Factory is a tool",
    "cli/export.py": "llama.cpp is a tool",
    "export/__main__.py": "llama.cpp is a tool",
    "export/gguf_file.py": "llama.cpp is a tool",
    "api/outputs.py": "llama.cpp is a tool",
    "api/foreign.py": "chat formats by the names that other tools have for them",
}


def names_of_families() -> re.Pattern[str]:
    """Model types, titles and prefixes of class names, without version numbers: llama, Qwen, Phi, ..."""
    types = {model_type for family in FAMILIES for model_type in family.model_types}
    words = {re.match("[a-z]+", kind)[0] for kind in types} | {family.name.split()[0] for family in FAMILIES}
    stems = {re.match("[A-Za-z]+", word)[0].lower() for word in words} - {"command", "dots", "gpt"}
    return re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(stems, key=len, reverse=True))})(?![a-z])", re.IGNORECASE)


def places(source: str, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Lines of names, texts and comments that the pattern finds; class names are taken apart at their capitals."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", token.string).replace("_", " ")
        found += [(token.start[0], match[0]) for text in (token.string, apart) for match in pattern.finditer(text)]
    return found


@pytest.mark.ci
def test_no_family_is_named_outside() -> None:
    pattern = names_of_families()
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.relative_to(SOURCES).parts[0] not in ("families", "importers")
        and str(path.relative_to(SOURCES)) not in EXEMPT
        for line, name in places(path.read_text(), pattern)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "kind = 'qwen2_vl'",
        "# as Llama-8B",
        "# SmolLM2's",
        "isinstance(m, Gemma3MLP)",
        "from x import modeling_phi3",
        "Olmo2",
    ],
)
def test_names_are_found_wherever_they_stand(line: str) -> None:
    assert places(line, names_of_families())
    assert not places("philosophy = mistrals + Philox", names_of_families())


def test_default_targets_are_pefts() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    default = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    of_text = [(kind, family.peft_targets) for family in FAMILIES if not family.towers for kind in family.model_types]
    assert [(kind, mine, default.get(kind)) for kind, mine in of_text if list(mine) != default.get(kind, [])] == []
    assert sum(bool(mine) for _, mine in of_text) >= 7


def test_exemptions_are_needed() -> None:
    pattern = names_of_families()
    assert [name for name in EXEMPT if not places((SOURCES / name).read_text(), pattern)] == []


def test_each_model_type_is_described_once() -> None:
    counts = Counter(model_type for family in FAMILIES for model_type in family.model_types)
    assert [model_type for model_type, count in counts.items() if count > 1] == []


def test_an_unknown_family_has_llamas_structure_and_is_not_measured() -> None:
    for config in ({"model_type": "unheard_of"}, {}, "unheard_of"):
        assert find(config) is UNKNOWN
    assert UNKNOWN.packs is None and not families.was_measured(UNKNOWN)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    assert families.block_shapes(UNKNOWN, sizes) == families.block_shapes(find("llama"), sizes)


@pytest.mark.parametrize(
    "kind", [kind for family in FAMILIES if not family.is_multimodal for kind in family.model_types]
)
def test_what_a_config_leaves_out_is_transformers_default(kind: str) -> None:
    """A published LLaVA 1.5 says of its text no more than its vocabulary and its positions."""
    from transformers import AutoConfig

    family, default = find(kind), AutoConfig.for_model(kind)
    default.allow_global_per_layer_attribute_access = True  # of one whose layers differ
    assert dict(family.sizes) == {key: getattr(default, key) for key in family.sizes}
    assert dict(family.flags) == {key: getattr(default, key) for key in family.flags}
    assert family.tied == getattr(default, "tie_word_embeddings", family.tied)
    assert family.attention_softcap == getattr(default, "attn_logit_softcapping", None)
    if family.latent_attention:  # queries and keys have two parts
        return
    width = family.head_dim or default.hidden_size // default.num_attention_heads
    assert width == (getattr(default, "head_dim", None) or width)


@pytest.mark.parametrize("name", families.known_modules())
def test_known_modules_are_in_transformers(name: str) -> None:
    known, owners = families.known_modules()[name], [f for f in FAMILIES for m in f.known_modules if m.name == name]
    kinds = {kind.removesuffix("_text") for family in owners for kind in family.model_types}
    homes = [importlib.import_module(f"{known.package}{kind}.modeling_{kind}") for kind in kinds]
    assert homes and all(isinstance(getattr(home, name), type) for home in homes)


@pytest.mark.parametrize("kind", [kind for family in FAMILIES if family.images for kind in family.model_types])
def test_images_become_inputs_of_the_forward_pass(kind: str) -> None:
    from transformers import AutoConfig

    layout, home = find(kind).images, importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config = AutoConfig.for_model(kind, vision_config={})
    shape, others = layout.kind.smallest(config)
    entries = {PIXELS: torch.zeros(shape)} | {name: torch.tensor(value) for name, value in others.items()}
    models = [value for name, value in vars(home).items() if name.endswith("ForConditionalGeneration")]
    inputs = {name for model in models for name in inspect.signature(model.forward).parameters}
    assert models and layout.kind.inputs(dict.fromkeys(layout.names) | entries).keys() <= inputs
    assert isinstance(getattr(config, layout.token_field), int)


@pytest.mark.parametrize("strange", [{}, [], 3, None])
def test_a_model_type_that_is_no_text_is_unknown(strange: object) -> None:
    assert find({"model_type": strange}) is UNKNOWN
