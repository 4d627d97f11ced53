"""What is read from disk, by kind: valid files, how a case changes one of them, and the product's own reader."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.importers.load import config_from_mapping, load_run
from manyhands.importers.translation import ImportContext
from tests.hostile.faults import (
    change_bytes,
    change_header,
    change_json,
    change_lines,
    change_packed,
    change_template,
    change_yaml,
)

Change = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Kind:
    """One kind of file: ``files`` below ``folder`` of what ``make_places`` makes, of which a case changes one; ``read``
    gets a folder with it and the others, as links or, where such a link would be refused, as ``copies``. ``share``: of
    all cases, in parts.
    """

    files: tuple[str, ...]
    change: Change
    read: Callable[[Path], Any]
    folder: str
    share: float = 1.0
    copies: bool = False


def changed_file(path: Path) -> Path:
    [file] = (one for one in path.iterdir() if not one.is_symlink())
    return file


def read_run_file(path: Path) -> Any:
    """A run file of ours or of another tool; or one that says how a run is distributed, beside ours."""
    file, context = changed_file(path), ImportContext(gpus=2, folder=path)
    if file.stem in ("accelerate", "deepspeed"):
        return load_run(path / "run.yaml", context=context, settings={file.stem: file}).config
    return load_run(file, ["stop.max_steps=2"], context=context).config


def read_override(path: Path) -> Any:
    """A file of lines, as they stand behind a command."""
    lines = (path / "overrides.txt").read_text(encoding="utf-8", errors="replace").split("\n")
    return load_run(path / "run.yaml", lines).config


def read_model(path: Path) -> Any:
    from manyhands.facts.model import read_model_facts

    return read_model_facts(path, "m", "pretrained")


def read_weights(path: Path) -> Any:
    """The model as it is loaded: built on meta by its config.json, given the values of its files."""
    import torch

    from tests.support.building import on_meta
    from tests.support.tiny import tiny_plan, tiny_run

    read_model(path)  # as the plan has
    loss_model, load = on_meta(tiny_plan(path), tiny_run(path))
    load(loss_model.model, torch.device("cpu"))


def read_adapter(path: Path) -> Any:
    from manyhands.config.schema import RunConfig
    from manyhands.facts.adapter import find_adapter

    fields = {
        "name": "n",
        "model": {"name": "m"},
        "data": {"train": "r.jsonl"},
        "method": {"name": "lora", "adapter": str(path)},
    }
    return find_adapter(RunConfig.model_validate(fields), report=lambda text: None)


def read_manifest(path: Path) -> Any:
    from manyhands.checkpoint import manifest

    found = manifest.read_manifest(path)
    manifest.check_sizes(path, found)
    return found


def read_checkpoint(path: Path) -> Any:
    """Each file of a checkpoint is compared with the hash of its manifest."""
    from manyhands.checkpoint.load import check_files

    return check_files(path)


def read_run_folder(path: Path) -> Any:
    from manyhands.launch.run.folder import RunFolder

    folder = RunFolder(path)
    folder.read_config()
    plan = folder.read_plan()
    return folder.read_status(), folder.ran_out_of_memory(plan), folder.newest_plan_number(), folder.read_failures()


def read_listed(path: Path) -> Any:
    """What `manyhands runs list`, `show` and `compare` read."""
    from typer.testing import CliRunner

    from manyhands.cli.main import app

    for command in (["list", "--dir", str(path.parent)], ["show", str(path)], ["compare", str(path), str(path)]):
        done = CliRunner().invoke(app, ["runs", *command])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            assert done.stderr.startswith("error: "), done.output
            raise UserError(done.stderr)


def read_curves(path: Path) -> Any:
    """What a resumed run and its report read of metrics.jsonl."""
    from manyhands.core.files import read_rows
    from manyhands.metrics.summary import make_curve, read_evaluations

    return read_evaluations(path / "metrics.jsonl"), make_curve(read_rows(path / "metrics.jsonl", "train"))


def read_store(path: Path) -> Any:
    from manyhands.data.store.store import TokenStore

    store = TokenStore.open(path)
    return [store.train.sample(number) for number in range(min(3, store.train.num_samples))]


def read_data(path: Path) -> Any:
    """A file of rows, in parts, up to conversations."""
    from manyhands.data.read.files import Findings
    from manyhands.data.read.formats import RowRefused, settle_format, to_conversation
    from manyhands.data.read.sources import read_part, read_rows, resolve_source, split_source

    file = changed_file(path)
    rows = [row for part in split_source(resolve_source(file), 3) for row in read_part(part, Findings())]
    rows += read_rows(file)
    for row in rows:
        try:
            to_conversation(row, settle_format([row], "auto", {}, "sft"))
        except RowRefused:
            continue


def read_prepared(path: Path) -> Any:
    """A whole preparation: tokenizer, chat template, rows, masks and the cache."""
    from manyhands.data.chat import template
    from manyhands.data.tokenize.prepare import prepare

    template.TRIAL_CPU_S = 1  # in place of 20: a tenth of the cases would wait for it
    rows = next(path / name for name in ("rows.jsonl", "chat.jsonl") if (path / name).exists())
    data = {"train": str(rows), "cache": str(path / "cache"), "validation_fraction": 0.0, "max_length": 512}
    model = {"name": str(path)}
    if (path / "chat_template.jinja").exists():
        model["chat_template"] = str(path / "chat_template.jinja")
    return prepare(config_from_mapping({"name": "n", "model": model, "data": data}), path, lambda text: None)


def read_image(path: Path) -> Any:
    from manyhands.data.images.files import BadImage, PixelBounds, decode, read_bytes

    bounds = PixelBounds(most=1 << 20)
    file = changed_file(path)
    try:
        pixels = decode(read_bytes(str(file)), file.name, bounds)
    except BadImage:
        return
    assert pixels.shape[2] == 3 and pixels.size <= 3 * bounds.most


def read_processor(path: Path) -> Any:
    """An image, as rows that name it find it."""
    from manyhands.data.images.files import BadImage
    from manyhands.data.images.open import ImageOpener
    from manyhands.data.images.processor import family_of
    from manyhands.data.images.rows import ImageRef
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    data = {"train": "rows.jsonl"}
    config = config_from_mapping({"name": "n", "model": {"name": str(path)}, "data": data})
    if family_of(path).images is not None:
        opener = ImageOpener(config.data, path, load_tokenizer(path))
        with contextlib.suppress(BadImage):
            opener.open_ref(ImageRef(str(path / "image.png")))


def read_prompts(path: Path) -> Any:
    from manyhands.infer.prompts import PromptOptions, encode_rows

    return encode_rows(path / "prompts.jsonl", _tokenizer(), {}, PromptOptions())


def read_answers(path: Path) -> Any:
    """Answers so far, which a second `manyhands generate` continues."""
    from manyhands.infer.answer_file import AnswerFile

    file = AnswerFile(path / "answers.jsonl", {"run": "n"}, 3)
    try:
        return [file.read(number) for number in sorted(file.answered)]
    finally:
        file.close()


def read_request(path: Path) -> Any:
    """A request to `manyhands serve`, up to what is to be answered."""
    from types import SimpleNamespace

    from manyhands.infer import serve
    from manyhands.infer.settings import SERVED

    tokenizer = _tokenizer()

    def encode(messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        from manyhands.infer.prompts import encode_prompt

        return encode_prompt(tokenizer, {}, messages, tools)

    answerer: Any = SimpleNamespace(tokenizer=tokenizer, num_positions=4096, encode=encode)
    try:
        body = serve.parse_body((path / "request.json").read_bytes())
        serve._Asked(answerer, body, "m", SERVED, is_chat="messages" in body)
    except serve.BadRequest as refused:
        assert str(refused)


@lru_cache
def _tokenizer() -> Any:
    from tests.support.tiny import tiny_tokenizer

    return tiny_tokenizer()


DATA_FILES = tuple(f"rows.{suffix}" for suffix in ("jsonl", "json", "csv", "tsv", "txt", "parquet", "arrow"))
IMAGES = tuple(f"image.{suffix}" for suffix in ("png", "jpg", "webp", "gif", "bmp", "tiff"))
MODELS = ("config.json", "model.safetensors")
RUN_FILES = ("run.json", "plan.json", "status.json", "plans/001.json")
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "config.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def change_model(rng: random.Random, raw: bytes) -> bytes:
    return change_json(rng, raw) if raw[:1] == b"{" else change_header(rng, raw)


KINDS: dict[str, Kind] = {
    "run": Kind(("run.yaml",), change_yaml, read_run_file, "native", 2),
    "override": Kind(("overrides.txt",), change_bytes, read_override, "overridden", 2),
    "dialect": Kind(
        ("axolotl.yaml", "llamafactory.yaml", "trl.yaml", "deepspeed.yaml", "accelerate.yaml", "synth.toml.json"),
        change_yaml, read_run_file, "dialects", 3,
    ),
    "data": Kind(DATA_FILES, change_bytes, read_data, "data", 6),
    "packed data": Kind(("rows.jsonl.gz",), change_packed, read_data, "packed"),
    "chat": Kind(("chat.jsonl",), change_lines, read_data, "chat", 4),
    "preparation": Kind(("chat.jsonl",), change_lines, read_prepared, "prepared", 0.05),
    "template": Kind(("chat_template.jinja",), change_template, read_prepared, "templates", 0.04),
    "tokenizer": Kind(TOKENIZER, change_json, read_prepared, "prepared", 0.05),
    "image": Kind(IMAGES, change_bytes, read_image, "images", 6),
    "image processor": Kind(PROCESSOR, change_json, read_processor, "vision", 0.05),
    "model": Kind(MODELS, change_model, read_model, "model", 2),
    "sharded model": Kind(("model.safetensors.index.json",), change_json, read_model, "sharded"),
    "weights": Kind(MODELS, change_model, read_weights, "model", 0.1),
    "adapter": Kind(ADAPTER, change_model, read_adapter, "adapter", 2, copies=True),
    "manifest": Kind(("manifest.json",), change_json, read_manifest, "checkpoint", 2),
    "checkpoint": Kind(("train_state.json", "manifest.json"), change_json, read_checkpoint, "checkpoint"),
    "run folder": Kind(RUN_FILES, change_json, read_run_folder, "runs/run", 3),
    "listed run": Kind(("status.json", "report.json", "metrics.jsonl"), change_lines, read_listed, "runs/run", 0.03),
    "curves": Kind(("metrics.jsonl",), change_lines, read_curves, "runs/run"),
    "store": Kind(("meta.json",), change_json, read_store, "store"),
    "prompts": Kind(("prompts.jsonl",), change_lines, read_prompts, "asked"),
    "answers": Kind(("answers.jsonl.partial",), change_lines, read_answers, "asked"),
    "request": Kind(("request.json",), change_json, read_request, "asked"),
}  # fmt: skip

FILES = {
    "axolotl.yaml": "base_model: model\ndatasets:\n- path: rows.jsonl\n  type: chat_template\nadapter: lora\n"
    "lora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nsequence_len: 512\nsample_packing: true\n"
    "micro_batch_size: 2\ngradient_accumulation_steps: 4\nnum_epochs: 1\noptimizer: adamw_torch\nlr_scheduler: cosine\n"
    "learning_rate: 0.0002\nbf16: auto\nwarmup_ratio: 0.1\nspecial_tokens: {pad_token: <pad>}\noutput_dir: ./out\n",
    "llamafactory.yaml": "model_name_or_path: model\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
    "lora_target: all\ndataset: rows\ndataset_dir: .\ntemplate: llama3\ncutoff_len: 512\noutput_dir: out\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\nnum_train_epochs: 3.0\n",
    "trl.yaml": "model_name_or_path: model\ndataset_name: rows.jsonl\nuse_peft: true\nlora_r: 16\nlora_alpha: 32\n"
    "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlearning_rate: 2.0e-4\npacking: true\n"
    "max_length: 1024\noutput_dir: out\n",
    "deepspeed.yaml": "zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\ngradient_clipping: 1.5\n"
    "train_micro_batch_size_per_gpu: auto\nbf16: {enabled: auto}\n",
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
    "num_machines: 1\nnum_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true,"
    " fsdp_offload_params: false, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n",
    "synth.toml.json": '{"algorithm": {"method": "supervised_finetune"}, "job": {"model": "model", "data": "r.jsonl"},'
    ' "hyperparameters": {"n_epochs": 1, "batch_size": 2}}',
}
OVERRIDES = "batch.samples=8\nmethod.rank=4\ndata.train=[a.jsonl, {path: b.jsonl, weight: 2}]\noptimizer.beta2=0.95"
CHATS = [
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]},
    {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "é\u202e 1 + 1?"},
                  {"role": "assistant", "content": "2", "weight": 0.5}], "tools": []},
    {"messages": [{"role": "user", "content": "The weather?"},
                  {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function",
                   "function": {"name": "weather", "arguments": {"place": "here", "days": [1, 2]}}}]},
                  {"role": "tool", "content": "rain", "tool_call_id": "abcdefghi"},
                  {"role": "assistant", "content": "Rain."}],
     "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]]},
    {"text": "Once upon a time"}, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"segments": [{"text": "a", "label": False}, {"text": "b", "label": True}]},
]  # fmt: skip
REQUEST = {
    "model": "m", "messages": CHATS[2]["messages"][:1], "tools": CHATS[2]["tools"], "temperature": 0.5, "top_p": 0.9,
    "max_tokens": 16, "stop": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "seed": 1, "n": 1,
    "user": "x", "response_format": {"type": "text"},
}  # fmt: skip


def make_places(folder: Path) -> None:
    """A valid file of each kind: a tiny run is trained for two steps."""
    from tests.e2e.runs import write_place

    write_place(folder)
    command = [sys.executable, "-m", "manyhands", "train", "run.yaml", "output.dir=runs", "stop.max_steps=2"]
    command += ["checkpoint.every_steps=2", "evaluate.every_steps=2", "evaluate.max_tokens=200"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("native", "overridden", "dialects"):
        (folder / name).mkdir()
        shutil.copy(folder / "run.yaml", folder / name / "run.yaml")
    (folder / "overridden" / "overrides.txt").write_text(OVERRIDES)
    (folder / "dialects" / "dataset_info.json").write_text('{"rows": {"file_name": "rows.jsonl"}}')
    (folder / "dialects" / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    for name, text in FILES.items():
        (folder / "dialects" / name).write_text(text)
    run = folder / "runs" / "run"
    (folder / "adapter").symlink_to(run / "adapter")
    (folder / "checkpoint").symlink_to(next((run / "checkpoints").glob("step-*")))
    (folder / "store").symlink_to(next(path.parent for path in (folder / "cache").rglob("meta.json")))
    make_data(folder)
    make_images(folder)
    make_models(folder)


def make_data(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from manyhands.core.files import write_json

    lines = "".join(json.dumps(row) + "\n" for row in CHATS)
    for name in ("data", "packed", "chat", "asked"):
        (folder / name).mkdir()
    (folder / "chat/chat.jsonl").write_text(lines)
    (folder / "packed/rows.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "data/rows.jsonl").write_text(lines)
    (folder / "data/rows.json").write_text(json.dumps({"version": 1, "data": CHATS}, indent=1))
    for suffix, comma in (("csv", ","), ("tsv", "\t")):
        rows = (("prompt", "completion"), ("a", '"b\nc"'), ("é", "d"))
        (folder / f"data/rows.{suffix}").write_text("".join(comma.join(row) + "\n" for row in rows))
    (folder / "data/rows.txt").write_text("One line.\n\nAnother document.\n")
    table = pa.Table.from_pylist([{"messages": row["messages"][:2]} for row in CHATS[:3]])
    pq.write_table(table, folder / "data/rows.parquet", compression="none")
    with pa.ipc.new_stream(folder / "data/rows.arrow", table.schema) as stream:
        stream.write_table(table)
    prompts = [{"prompt": "a"}, {"messages": REQUEST["messages"], "tools": REQUEST["tools"], "answer": "b"}]
    (folder / "asked/prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    answers: list[dict[str, Any]] = [{"identity": {"run": "n"}, "num_prompts": 3}]
    answers += [{"number": number, "answer": "b", "finish_reason": "stop"} for number in range(2)]
    (folder / "asked/answers.jsonl.partial").write_text("".join(json.dumps(row) + "\n" for row in answers))
    write_json(folder / "asked/request.json", REQUEST)


def make_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    from tests.support.vision import write_tiny_processor

    (folder / "images").mkdir()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    for name in IMAGES:
        if name.endswith((".jpg", ".png", ".webp", ".tiff")):
            image.save(folder / "images" / name, exif=exif)
        else:
            image.save(folder / "images" / name)
    write_tiny_processor(folder / "vision", "qwen2_5_vl")
    shutil.copy(folder / "images/image.png", folder / "vision/image.png")


def make_models(folder: Path) -> None:
    from manyhands.config.named_templates import TEMPLATES
    from tests.support.tiny import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(folder / "sharded", max_shard_size="20KB")
    for name in ("prepared", "templates"):
        tiny_tokenizer().save_pretrained(folder / name)
        (folder / name / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS[:2]))
    (folder / "templates/chat_template.jinja").write_text(TEMPLATES["llama3"].text)


def arrange(place: Path, kind: Kind, name: str, seed: int, number: int, work: Path) -> Path:
    """The folder of one case: the files of its kind, one of them changed."""
    rng = random.Random(f"{name}/{seed}/{number}")
    source = (place / kind.folder).resolve()
    chosen = rng.choice(kind.files)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    own = Path(chosen).parts[0]
    for path in source.iterdir():
        if path.name != own and kind.copies and path.is_file():
            shutil.copyfile(path, work / path.name)
        elif path.name != own:
            (work / path.name).symlink_to(path)
    (work / chosen).parent.mkdir(exist_ok=True)
    (work / chosen).write_bytes(kind.change(rng, (source / chosen).read_bytes()))
    return work
