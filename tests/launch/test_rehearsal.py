"""``--dry-run`` refuses what the workers would refuse of the model, before a folder is made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.core.errors import UserError
from manyhands.importers.load import load_config
from manyhands.launch.run.prepare import gather_facts
from manyhands.launch.run.rehearsal import may_match_nothing
from manyhands.launch.run.rehearsal import rehearse as rehearse_in_process
from manyhands.planner.search import plan as make_plan
from tests.e2e.runs import Place, write_place

PATTERNS = ("method.name=patterns", "method.rank=16", "method.alpha=32", "method.dropout=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return write_place(tmp_path_factory.mktemp("rehearsal"))


def rehearse(place: Place, *arguments: str) -> str:
    """What the rehearsal's process says of a run, here without the process; "" where it has nothing against it."""
    from manyhands.convert.rehearse import rehearse

    config = load_config(place.folder / "run.yaml", arguments)
    plan = make_plan(config, gather_facts(config, report=lambda _: None))
    try:
        rehearse(config, plan)
    except UserError as error:
        return str(error)
    return ""


def changed_model(place: Place, folder: Path, **fields: object) -> str:
    shutil.copytree(place.folder / "model", folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return f"model.name={folder}/model"


@pytest.mark.ci
def test_a_dry_run_asks_and_leaves_no_folder(place: Place, tmp_path: Path) -> None:
    run = ["train", str(place.folder / "run.yaml"), "--dry-run", "name=dry", f"output.dir={tmp_path}", *PATTERNS]
    refused = CliRunner().invoke(app, [*run, "method.train=[no_such_layer]"])
    assert refused.exit_code == 2 and "'no_such_layer' in method.train matches no weight" in refused.stderr, (
        refused.output
    )
    assert not (tmp_path / "dry").exists()


def test_a_process_that_cannot_answer_is_a_refusal(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(place.folder / "run.yaml")
    plan = make_plan(config, gather_facts(config, report=lambda _: None))
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    with pytest.raises(UserError, match="cannot be built") as refused:
        rehearse_in_process(config, plan)
    assert "exit code 1" in refused.value.why


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ""),
        ((*PATTERNS, "method.train=[layers.1]"), ""),
        ((*PATTERNS, "method.freeze=['re:model.*', lm_head]"), "no weight is trained"),
        (("method.modules_to_save=[nothing]",), "'nothing' in method.modules_to_save"),
        (
            ("optimizer.learning_rates={nothing: 1e-4}",),
            "'nothing' of optimizer.learning_rates chooses no trained weight",
        ),
    ],
)
def test_patterns_that_match_nothing(place: Place, arguments: tuple[str, ...], words: str) -> None:
    said = rehearse(place, *arguments)
    assert words in said and bool(words) == bool(said)


# What the workers refuse, and what they accept.
FULL = ("method.name=full", *PATTERNS[1:])
MUON = (*PATTERNS, "optimizer.name=muon", "method.train=[norm]")
LORA = "optimizer.learning_rates={'*.lora_B.*': 1e-3, lm_head: 1e-4}"
REFUSED = [
    (*PATTERNS, "method.train=[layers.1, nothing]"),
    (*PATTERNS, "method.train=['layers[7:]']"),
    (*PATTERNS, "method.freeze=[nothing]"),
    (*PATTERNS, "method.freeze=['re:model.*', lm_head]"),
    ("method.target_modules=[q_proj, nothing]",),
    ("method.target_modules=[q_proj, lm_head]",),
    ("method.modules_to_save=[nothing]",),
    ("method.modules_to_save=[layers]",),
    ("method.target_modules=[q_proj, v_proj]", "method.modules_to_save=[v_proj]"),
    ("optimizer.learning_rates={embed_tokens: 1e-4}",),
    (*FULL, "optimizer.learning_rates={'*_proj': 1e-4, q_proj: 1e-3}"),
    MUON,
]
ACCEPTED = [
    ("optimizer.name=muon",),
    (*PATTERNS, "method.train=['layers[-1:].mlp', lm_head]", "method.freeze=['re:.*up_proj.*']", "optimizer.name=muon"),
    ("method.target_modules=[q_proj, 're:.*layers\\.1\\.mlp\\.up_proj']", "method.modules_to_save=[lm_head]", LORA),
    (*FULL, "optimizer.learning_rates={q_proj: 1e-3, '*_proj': 1e-4, lm_head: 1e-5}"),
]


@pytest.mark.parametrize("arguments", [*REFUSED, *ACCEPTED])
def test_names_in_the_files_show_what_need_not_be_rehearsed(place: Place, arguments: tuple[str, ...]) -> None:
    config = load_config(place.folder / "run.yaml", arguments)
    facts = gather_facts(config, report=lambda _: None)
    try:
        plan = make_plan(config, facts)
    except UserError as error:
        assert "no layer matches" in str(error)
        return
    assert may_match_nothing(config, plan, facts.model) == (arguments in REFUSED) == bool(rehearse(place, *arguments))


@pytest.mark.ci
@pytest.mark.parametrize("command", ["plan", "train"])
def test_what_matches_nothing_is_refused_before_the_launch(place: Place, tmp_path: Path, command: str) -> None:
    run = [command, str(place.folder / "run.yaml"), "name=early", f"output.dir={tmp_path}", *MUON]
    refused = CliRunner().invoke(app, run)
    assert refused.exit_code == 2 and "no matrix of the blocks is trained" in str(refused.stderr), refused.output
    assert not (tmp_path / "early").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"intermediate_size": 96}, "the weights do not fit LlamaForCausalLM"),
        ({"hidden_act": "nonsense"}, "transformers cannot build a language model of llama"),
        ({"rms_norm_eps": "small"}, "transformers cannot"),
        ({"num_hidden_layers": 5}, "missing: model.layers.3"),
    ],
)
def test_a_config_that_its_weights_contradict(place: Place, tmp_path: Path, fields: dict, words: str) -> None:
    assert words in rehearse(place, changed_model(place, tmp_path, **fields))
