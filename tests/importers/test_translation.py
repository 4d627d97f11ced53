"""What every importer has from ``Translator``: an outcome for each key, its line, contradictions, defaults, unknown
keys.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.config.lines import blank_json_comments, json_lines, toml_lines
from manyhands.config.read import ParsedFile, read_run_file
from manyhands.core.errors import UserError
from manyhands.importers.load import load_run
from manyhands.importers.translation import ImportContext, Translation, Translator, check_product

KNOWN = {"rate", "batch", "gpus", "total", "lora.r", "extra", "mode"}


def translator(context: ImportContext | None = None, **values: object) -> Translator:
    lines = {key: number for number, key in enumerate(values, 1)}
    return Translator(
        ParsedFile(dict(values), "their.yaml", lines), context or ImportContext(), tool="Toy", known=KNOWN
    )


def kinds(translation: Translation) -> dict[str, str]:
    return {outcome.key: outcome.kind for outcome in translation.outcomes}


def test_every_key_of_the_file_has_one_fate_in_the_file_s_order() -> None:
    t = translator(rate="2e-5", lora={"r": 8}, extra=None, colour=1)
    t.map("rate", "optimizer.learning_rate", t.number("rate"))
    t.map("lora.r", "method.rank")
    done = t.finish()
    assert kinds(done) == {"rate": "mapped", "lora.r": "mapped", "extra": "not_set", "colour": "ignored"}
    assert done.mapping == {"optimizer": {"learning_rate": 2e-5}, "method": {"rank": 8}}
    assert done.origins["optimizer.learning_rate"] == "line 1, `rate`"


def test_a_known_key_that_a_importer_forgets_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="`rate` has no outcome"):
        translator(rate=1).finish()


def test_a_near_miss_is_refused_and_other_unknown_keys_are_reported_unless_the_tool_refuses_them() -> None:
    t = translator(rates=1, colour=2)
    assert kinds(t.finish()) == {"rates": "refused", "colour": "ignored"}
    with pytest.raises(UserError, match=r"line 1, `rates`: Toy has no such key: did you mean `rate`\?"):
        translator(rates=1).finish().refuse()
    assert kinds(translator(colour=2).finish(refuse_unknown=True)) == {"colour": "refused"}
    assert kinds(translator(rates=1).finish(elsewhere={"rates"})) == {"rates": "ignored"}, "another tool's own key"


def test_two_keys_that_set_one_of_ours_differently_contradict_each_other() -> None:
    t = translator(batch=8, total=16)
    t.map("batch", "batch.samples")
    t.map("total", "batch.samples")
    assert t.finish().findings() == [
        "line 2, `total`: asks for `batch.samples: 16`, but line 1, `batch` for 8: remove one"
    ]
    same = translator(batch=8, total=8)
    same.map("batch", "batch.samples")
    same.map("total", "batch.samples")
    assert same.finish().findings() == []


def test_a_tool_s_default_gives_way_to_the_file() -> None:
    t = translator(rate=1e-4)
    t.set_tool_default("optimizer.learning_rate", 5e-5, "Toy's default")
    t.map("rate", "optimizer.learning_rate")
    t.set_tool_default("optimizer.learning_rate", 5e-5, "Toy's default")
    t.set_tool_default("seed", 42, "Toy's default")
    done = t.finish()
    assert done.mapping == {"optimizer": {"learning_rate": 1e-4}, "seed": 42}
    assert done.tool_defaults == {"seed": "Toy's default"}


def test_substitutions_are_refused_by_a_strict_caller() -> None:
    for strict, kind in ((False, "substituted"), (True, "refused")):
        t = translator(ImportContext(strict=strict), mode="fp16")
        t.substitute("mode", {"model.dtype": "bfloat16"}, "float16 is not available: bfloat16")
        assert kinds(t.finish()) == {"mode": kind}


def test_a_wrong_product_is_refused_with_its_sum() -> None:
    t = translator(batch=1, gpus=8, total=64)
    check_product(t, "total", (("batch", 1), ("gpus", 8), ("accumulation", 16)))
    t.no_op("batch")
    t.no_op("gpus")
    sum_ = "batch × gpus × accumulation is 1 × 8 × 16 = 128, not 64"
    assert t.finish().findings() == [f"line 3, `total`: {sum_}: correct one of them"]


def test_gpus_are_those_of_the_first_start_then_the_file_s_then_asked_for_then_the_machine_s() -> None:
    assert translator().num_gpus() is None
    assert translator(ImportContext(count_gpus=lambda: 0)).num_gpus() == 1
    assert translator(ImportContext(count_gpus=lambda: 4)).num_gpus() == 4
    t = translator(ImportContext(count_gpus=lambda: 4))
    t.set_gpus(8)
    assert t.num_gpus() == 8
    assert translator(ImportContext(gpus=2, count_gpus=lambda: 4)).num_gpus() == 2
    t = translator(ImportContext(gpus=2))
    t.set_gpus(8)
    assert t.num_gpus() == 8
    t = translator(ImportContext(gpus=2, first_gpus=3))
    t.set_gpus(8)
    assert t.num_gpus() == 3


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".yaml", "# c\na:\n  b: 1\n  c:\n    - d: 2\n      e: 3\n    - 4\n"),
        (".json", '// c\n{"a": {\n"b": 1, /* "b": 2 */\n"c": [\n{"d": 2,\n"e": 3}, 4]}}'),
        (".toml", "# c\n[a] # x = 1\nb = 1 # ]\n[[a.c]]\nd = 2\ne = 3\n"),
    ],
)
def test_keys_have_their_lines_three_levels_deep_in_every_syntax(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"run{suffix}"
    path.write_text(text)
    parsed = read_run_file(path)
    lines = text.split("\n")
    for key in ("a.b", "a.c[0].d", "a.c[0].e"):
        assert f"{key[-1]}" in lines[parsed.lines[key] - 1], (key, parsed.lines)


def test_scanners_are_not_misled_by_strings_and_comments() -> None:
    text = '{"u": "http://x", "a//": 1, // "z": 1\n"b\\"": {"c": "}{,:"}, "d": [[1,\n2]]}'
    assert json_lines(text) == {"u": 1, "a//": 1, 'b\\"': 2, 'b\\".c': 2, "d": 2, "d[0]": 2, "d[0][0]": 2, "d[0][1]": 3}
    assert '"http://x"' in blank_json_comments(text) and '"z"' not in blank_json_comments(text)
    assert toml_lines('a = """\n[no]\nb = 1\n"""\nc = [ # [\n1,\n]\nd.e = "x # y = 1"\n') == {
        "a": 1,
        "c": 5,
        "d": 8,
        "d.e": 8,
    }


TRL_FILE = "model_name_or_path: org/model\ndataset_name: org/data\nuse_peft: true\nlora_r: 4\nmax_length: 64\n"


def test_a_file_of_another_tool_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRL_FILE + "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n")
    run = load_run(tmp_path / "sft.yaml", ["data.max_length=32"], context=ImportContext(count_gpus=lambda: 2))
    assert run.config.method.rank == 4 and run.config.batch.samples == 16 and run.config.data.max_length == 32
    assert run.config.name == "sft" and run.translation is not None and run.translation.gpus == 2


def test_what_our_schema_finds_names_the_place_in_their_file(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRL_FILE + "learning_rate: -1\n")
    with pytest.raises(UserError, match=r"line 6, `learning_rate`: `optimizer.learning_rate`: got -1"):
        load_run(tmp_path / "sft.yaml", ["parallel.gpus=1"])


def test_a_file_with_keys_of_two_tools_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRL_FILE + "batch:\n  samples: 8\n")
    with pytest.raises(UserError, match="a key of manyhands, in a file that is read as TRL's"):
        load_run(tmp_path / "sft.yaml", ["parallel.gpus=1"])


def test_without_any_number_of_gpus_a_per_gpu_batch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRL_FILE + "per_device_train_batch_size: 2\n")
    with pytest.raises(UserError, match=r"line 6, `per_device_train_batch_size`: .*add parallel.gpus=N"):
        load_run(tmp_path / "sft.yaml")


def test_an_override_replaces_what_excludes_it_in_a_translation(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(TRL_FILE + "packing: true\nsave_strategy: epoch\nsave_total_limit: 2\n")
    ours = ["parallel.gpus=1", "batch.samples=4", "checkpoint.every_steps=0"]
    config = load_run(tmp_path / "sft.yaml", ours).config
    assert (config.batch.samples, config.batch.packs) == (4, None)
    assert (config.checkpoint.every_steps, config.checkpoint.per_epoch) == (0, None)
