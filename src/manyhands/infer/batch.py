"""``manyhands generate --input``: answers to a file of prompts, on all GPUs, in the order of the file."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from manyhands.core.errors import EXIT_FAILED, OUT_OF_MEMORY, UserError
from manyhands.core.files import hash_files, refuse_outside_links
from manyhands.core.text import report_aside
from manyhands.core.units import count_of
from manyhands.infer.answer_file import AnswerFile
from manyhands.infer.decode import Completion
from manyhands.infer.images import open_images
from manyhands.infer.load import Answerer, ModelLocation, find_parts, load_answerer, open_found_tokenizer
from manyhands.infer.prompts import NOTHING_ADDED, PromptOptions, encode_rows, read_rows
from manyhands.infer.replicas import ALL_GPUS, DeviceSlot, Placement, count_weight_bytes, describe_slot, run_tasks
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.worker import PromptQueue, Worker

REPORT_EVERY_S = 5.0

Report = Callable[[str], object]


def open_replica(
    slot: DeviceSlot, found: ModelLocation, settings: GenerationSettings, placement: Placement, num_replicas: int
) -> Any:
    """The model at a slot; called in the process that is to use it."""
    if placement.engine == "vllm":
        from manyhands.infer.vllm import VllmWorker

        return VllmWorker(found, settings, slot)
    return Worker(
        load_at(slot, found, placement),
        settings,
        max_rows=placement.batch_size,
        num_processes=1 if slot.gpus else num_replicas,
    )


def load_at(slot: DeviceSlot, found: ModelLocation, placement: Placement) -> Answerer:
    """The model at a slot of this process."""
    slot.enter()
    device_map: str | None = None
    if len(slot.gpus) > 1:
        device_map = "sequential" if placement.device_map == "sequential" else "balanced"
    try:
        return load_answerer(found, f"cuda:{slot.gpus[0]}" if slot.gpus else "cpu", device_map, slot.gpus)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the model does not fit on {describe_slot(slot)}",
            where=str(found.weights),
            why=str(error).split("\n")[0],
            fix="divide it over more GPUs: --device-map balanced",
            exit_code=EXIT_FAILED,
            kind=OUT_OF_MEMORY,
        ) from error


def open_placed(folder: Path, base: str | None = None, placement: Placement = ALL_GPUS) -> Answerer:
    """The model in this process, over as many GPUs as it needs; the other GPUs stay idle."""
    found = find_parts(folder, base)
    return load_at(placement.slots(count_weight_bytes(found.weights))[0], found, placement)


def answer_file(
    folder: Path,
    prompts_file: Path,
    output: Path,
    settings: GenerationSettings,
    *,
    base: str | None = None,
    options: PromptOptions = NOTHING_ADDED,
    placement: Placement = ALL_GPUS,
    overwrite: bool = False,
    report: Report = report_aside,
) -> int:
    """Answers a JSONL file's prompts in order, or continues after a kill; returns how many. Raises UserError."""
    found = find_parts(folder, base)
    if placement.engine == "vllm":
        from manyhands.infer.vllm import refuse_missing_vllm

        refuse_missing_vllm()
    slots = placement.slots(count_weight_bytes(found.weights))
    tokenizer = open_found_tokenizer(found)
    max_tokens = read_max_tokens(found, settings)
    takes = placement.engine == "transformers"
    images = open_images(found.weights, tokenizer, found.image_sizes) if takes else None
    prompts = encode_rows(prompts_file, tokenizer, found.chat_template_kwargs, options, max_tokens, images)
    identity = identify(found, prompts_file, settings, options, placement, bool(slots[0].gpus))
    answers = AnswerFile(output, identity, len(prompts), overwrite=overwrite)
    try:
        answered = answers.answered
        waiting = [prompt for prompt in prompts if prompt.number not in answered]
        where = f"on {describe_slot(slots[0])}" if len(slots) == 1 else f"{len(slots)} copies of the model"
        if len(slots) > 1 and slots[0].gpus:
            where += f" on {len(slots) * len(slots[0].gpus)} GPUs"
        already = f", {len(answered):,} of them answered already" if answered else ""
        report(f"{count_of(len(prompts), 'prompt')}{already}, {where}")
        start = shown = time.monotonic()
        new = tokens = 0

        def describe_rate() -> str:
            seconds = max(time.monotonic() - start, 1e-9)
            return f"{new / seconds:.1f} answers/s, {tokens / seconds:,.0f} tokens/s"

        def take(result: list[tuple[int, Completion]]) -> None:
            nonlocal new, tokens, shown
            for number, answer in result:
                tokens += len(answer.ids)
                fields = {"answer": answer.text, "finish_reason": answer.finish_reason}
                counts = {"prompt_tokens": len(prompts[number].ids), "answer_tokens": len(answer.ids)}
                answers.add(number, fields | counts)
            new += len(result)
            if time.monotonic() - shown >= REPORT_EVERY_S:
                shown = time.monotonic()
                report(f"{len(answered) + new:,} of {len(prompts):,} answered, {describe_rate()}")

        if waiting:
            queue = PromptQueue(waiting, settings.max_new_tokens, len(slots))
            make = functools.partial(
                open_replica, found=found, settings=settings, placement=placement, num_replicas=len(slots)
            )
            run_tasks(slots, make, queue.take, take)
        if hash_files([prompts_file])[prompts_file] != identity["prompts"]:
            raise UserError(
                "the prompts have changed while they were answered",
                where=str(prompts_file),
                fix=f"put them back as they were, or delete {answers.partial.name} to answer the new ones",
            )
        answers.finish(row for _, row in read_rows(prompts_file))
        report(f"{count_of(len(prompts), 'answer')} in {output}" + (f", {describe_rate()} with loading" if new else ""))
    finally:
        answers.close()
    return len(prompts)


def read_max_tokens(found: ModelLocation, settings: GenerationSettings) -> int | None:
    """The longest prompt that leaves room for the answer among the model's positions."""
    from transformers import AutoConfig

    positions = getattr(AutoConfig.from_pretrained(found.weights).get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return None
    if settings.max_new_tokens >= positions:
        raise UserError(
            f"--max-new-tokens {settings.max_new_tokens:,} leaves no room for a prompt",
            where="--max-new-tokens",
            why=f"the model has {positions:,} positions",
        )
    return int(positions) - settings.max_new_tokens


def identify(
    found: ModelLocation,
    prompts_file: Path,
    settings: GenerationSettings,
    options: PromptOptions,
    placement: Placement,
    on_gpu: bool,
) -> dict[str, Any]:
    """What decides about answers: files by size and time, prompts by content. GPUs and batches do not."""
    files: dict[str, list[Any]] = {}
    for folder in filter(None, (found.weights, found.adapter)):
        refuse_outside_links(folder)
        for path in sorted(folder.glob("*")):
            if path.suffix in (".safetensors", ".json", ".jinja", ".model"):
                status = path.stat()
                files[str(path)] = [status.st_size, status.st_mtime_ns]
    return {
        "model": files,
        "chat_template": found.chat_template,
        "chat_template_kwargs": {k: v for k, v in found.chat_template_kwargs.items() if k != "strftime_now"},
        "image_sizes": found.image_sizes,
        "prompts": hash_files([prompts_file])[prompts_file],
        "system": options.system,
        "tools": list(options.tools),
        "engine": placement.engine,
        "device": "cuda" if on_gpu else "cpu",
        **settings.to_json(),
        "stop": list(settings.stop),
    }
