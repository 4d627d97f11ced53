"""``--engine vllm``: the same prompts, tokens and settings, answered by vLLM where it is installed."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.facts.adapter import read_adapter_config
from manyhands.infer.decode import Completion, find_stop
from manyhands.infer.load import ModelLocation, find_ends, open_found_tokenizer
from manyhands.infer.prompts import PromptTokens
from manyhands.infer.replicas import ALL_GPUS, DeviceSlot, Placement
from manyhands.infer.settings import SERVED, GenerationSettings
from manyhands.infer.worker import BatchCapacity

MAX_PROMPTS = 4096  # of a task; vLLM makes its own batches out of them
RANK_LIMITS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's max_lora_rank
REFUSED_KEYS = ("use_dora", "modules_to_save", "trainable_token_indices")  # of an adapter's configuration


def refuse_missing_vllm() -> None:
    if find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed",
            where="--engine vllm",
            why="this Python has no package vllm",
            fix="pip install vllm (in an environment of its own, with manyhands), or leave --engine out",
        )


def refuse_adapter(found: ModelLocation) -> None:
    """UserError for an adapter that is more than LoRA: vLLM serves those merged only."""
    fields = read_adapter_config(found.adapter) if found.adapter is not None else {}
    if extra := next((key for key in REFUSED_KEYS if fields.get(key)), None):
        raise UserError(
            "vLLM does not take this adapter",
            where=str(found.adapter),
            why=f"it has {extra}",
            fix="merge it: manyhands export RUN --merge, and give that folder",
        )


class VllmWorker:
    """A copy of the model in vLLM; its layers are divided by tensor parallelism where the slot has several GPUs."""

    def __init__(self, found: ModelLocation, settings: GenerationSettings, slot: DeviceSlot) -> None:
        refuse_adapter(found)
        if slot.gpus:
            slot.hide_others()
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        tokenizer = open_found_tokenizer(found)
        self._tokenizer = tokenizer
        self._ends = find_ends(found, tokenizer)
        rank = {} if found.adapter is None else {"max_lora_rank": lora_rank_limit(found.adapter)}
        self._adapter: Any = None if found.adapter is None else LoRARequest("adapter", 1, str(found.adapter))
        self._model = LLM(
            model=str(found.weights),
            skip_tokenizer_init=True,
            tensor_parallel_size=max(1, len(slot.gpus)),
            dtype="auto" if slot.gpus else "float32",
            enable_lora=found.adapter is not None,
            seed=settings.seed,
            **rank,
        )
        self._settings, self._parameters = settings, SamplingParams
        self.capacity = BatchCapacity(1 << 62, 0, 0, 1, MAX_PROMPTS, None, pads=True)

    def run(self, task: list[PromptTokens]) -> list[tuple[int, Completion]]:
        """Answers with the prompts' numbers. Stop strings are looked for afterwards: tokens go in and out."""
        settings = self._settings
        parameters = [
            self._parameters(
                max_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k or -1,
                repetition_penalty=settings.repetition_penalty,
                seed=None if settings.is_greedy else settings.seed + prompt.number,
                stop_token_ids=sorted(self._ends),
                ignore_eos=True,  # the end tokens are ours
                detokenize=False,
            )
            for prompt in task
        ]
        prompts = [{"prompt_token_ids": list(prompt.ids)} for prompt in task]
        outputs = self._model.generate(prompts, parameters, lora_request=self._adapter, use_tqdm=False)
        return [
            (prompt.number, self._complete(list(output.outputs[0].token_ids)))
            for prompt, output in zip(task, outputs, strict=True)
        ]

    def _complete(self, ids: list[int]) -> Completion:
        ended = bool(ids) and ids[-1] in self._ends
        new = ids[:-1] if ended else ids
        text = self._tokenizer.decode(new, skip_special_tokens=True)
        end = find_stop(text, self._settings.stop)
        return Completion(tuple(new), text[:end].strip(), "length" if end is None and not ended else "stop")


def server_command(
    found: ModelLocation,
    name: str,
    host: str,
    port: int,
    settings: GenerationSettings = SERVED,
    placement: Placement = ALL_GPUS,
) -> list[str]:
    """Arguments for vLLM's own server: the model as ``name``, an adapter unmerged. UserError for settings it lacks."""
    given = {
        "--max-new-tokens": settings.max_new_tokens != SERVED.max_new_tokens,
        "--stop": bool(settings.stop),
        "--device-map": placement.device_map != ALL_GPUS.device_map,
    }
    if option := next((option for option, is_given in given.items() if is_given), None):
        raise UserError(
            f"{option} has no effect on vLLM's server",
            where=option,
            why="it divides layers by --gpus N, and takes lengths and stop strings from requests",
            fix="leave it out, or add --engine transformers",
        )
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(found.weights)]
    command += ["--host", host, "--port", str(port)]
    if found.adapter is None:
        command += ["--served-model-name", name]
    else:
        command += ["--enable-lora", "--max-lora-rank", str(lora_rank_limit(found.adapter))]
        command += ["--lora-modules", f"{name}={found.adapter}"]
    # By itself it answers the pages of every site, under any name of the host.
    command += ["--allowed-origins", "[]", "--middleware", "manyhands.infer.http.LocalHosts"]
    if found.adapter is not None and (found.adapter / "tokenizer_config.json").is_file():
        command += ["--tokenizer", str(found.adapter)]
    if found.chat_template is not None:
        command += ["--chat-template", found.chat_template]
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k or -1}
    sampling["repetition_penalty"] = settings.repetition_penalty
    command += ["--generation-config", "vllm", "--override-generation-config", json.dumps(sampling)]
    command += ["--tensor-parallel-size", str(placement.gpus)] if placement.gpus is not None else []
    command += ["--max-num-seqs", str(placement.batch_size)] if placement.batch_size is not None else []
    arguments = {key: value for key, value in found.chat_template_kwargs.items() if key != "strftime_now"}
    return [*command, *(["--default-chat-template-kwargs", json.dumps(arguments)] if arguments else [])]


def lora_rank_limit(adapter: Path) -> int:
    """The least of the limits that vLLM knows; UserError for a rank above all of them."""
    rank = int(read_adapter_config(adapter)["r"])
    limit = next((limit for limit in RANK_LIMITS if limit >= rank), None)
    if limit is None:
        raise UserError(
            f"vLLM takes adapters up to rank {RANK_LIMITS[-1]}, this one has {rank}",
            where=str(adapter),
            fix="merge it: manyhands export RUN --merge, and give that folder",
        )
    return limit
