"""Answers from a trained model on all GPUs, from Python.

    python examples/multi_gpu_inference.py outputs
    torchrun --nproc_per_node=4 examples/multi_gpu_inference.py outputs     # the same: rank 0 has it done

A file of prompts is answered by a copy of the model on each GPU, in the order of the file; a model that does not fit on
one GPU is spread over as many as hold it. Started again after a stop, it continues.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import manyhands as mh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a run's folder, a model folder or an adapter folder")
    parser.add_argument(
        "--prompts", type=Path, help="JSONL with a prompt, or messages, a row; three questions if left out"
    )
    parser.add_argument("--output", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--processes", type=int, default=1, help="without GPUs: so many processes")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    model = mh.load(options.folder)
    prompts = options.prompts
    if prompts is None:
        questions = ["Why is the sky blue?", "Why is the sea salty?", "Why does ice float?"]
        prompts = options.output.with_suffix(".prompts.jsonl")
        if mh.get_rank() == 0:
            prompts.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    rows = model.generate_file(
        prompts, options.output, processes=options.processes, max_new_tokens=options.max_new_tokens, overwrite=True
    )
    if mh.get_rank() == 0:
        for row in rows[:3]:
            print(row)
        print(f"{len(rows)} answers in {options.output}")


if __name__ == "__main__":
    main()
