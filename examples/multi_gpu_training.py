"""Fine-tuning on all GPUs from Python.

    python examples/multi_gpu_training.py                               # starts one process per GPU
    torchrun --nproc_per_node=4 examples/multi_gpu_training.py          # or under a launcher
    accelerate launch --multi_gpu --num_processes 4 examples/multi_gpu_training.py

The rows are in memory here; a list of dicts, a datasets.Dataset, a pandas DataFrame, or the path of a file do as well.
Starting it again resumes a run that was interrupted.
"""

from __future__ import annotations

import argparse

from manyhands import FastLanguageModel, Trainer, TrainingArguments, get_rank, print_distributed_info

QUESTIONS = (
    ("Why is the sky blue?", "Air scatters blue light more than red light."),
    ("Why is the sea salty?", "Rivers carry dissolved minerals into it, and only water evaporates."),
    ("Why do leaves turn yellow?", "Trees take the green pigment back before winter."),
    ("Why does ice float?", "Water expands as it freezes, so ice is lighter than water."),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub name or folder")
    parser.add_argument("--output", default="./outputs", help="folder of the run")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    print_distributed_info()
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=options.model,
        max_seq_length=1024,
        load_in_4bit=False,  # True trains beside 4-bit weights (NF4)
        device_map="auto",  # each process has its GPU; the model is sharded where it does not fit on one
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16)
    rows = [{"prompt": question, "completion": answer} for question, answer in QUESTIONS * 8]
    trainer = Trainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=rows,
        args=TrainingArguments(
            per_device_train_batch_size=2,  # a step has this times the GPUs times the accumulation
            gradient_accumulation_steps=2,
            learning_rate=2e-4,
            max_steps=options.steps,
            logging_steps=1,
            output_dir=options.output,
        ),
    )
    run = trainer.train()
    if get_rank() == 0:
        print(f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}; the adapter is in {run.outputs['adapter']}")
        print(model.generate(QUESTIONS[0][0], max_new_tokens=32))


if __name__ == "__main__":
    main()
