"""The lines with which a run starts."""

from __future__ import annotations

from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import Prepared, summarize_start
from manyhands.planner.search import plan
from tests.planner.examples import GIB, data_facts, facts, llama_8b, run_config


def summary(config, found, *, resume: bool = False, folder: str = "none", starts: bool = True) -> list[str]:
    prepared = Prepared(RunFolder(folder), config, plan(config, found), resume=resume, finished=False)
    return summarize_start(prepared, starts=starts)


def test_a_start_says_what_was_found_and_what_a_step_is():
    config = run_config(data__packing=False, batch__samples=32, batch__micro_samples=4)
    assert summary(config, facts(llama_8b(), gpus=2, data=data_facts(longest=2048))) == [
        "[train] Detected 2 GPUs:",
        "  GPU 0: NVIDIA H200 (140.0 GiB)",
        "  GPU 1: NVIDIA H200 (140.0 GiB)",
        "[train] Total VRAM: 280.0 GiB",
        "[train] Batch size: 4 per GPU, gradient accumulation: 4",
        "[train] Effective batch size: 32",
        "[train] Starting new lora ddp run with bf16 precision on 2 GPUs",
    ]


def test_gpus_that_are_not_here_are_not_detected():
    found = facts(llama_8b(), data=data_facts(longest=2048)).model_copy(
        update={"host": describe_host(parse_gpus("2xH200"))}
    )
    lines = summary(run_config(), found, starts=False)
    assert lines[0] == "[train] Planned for 2 GPUs:" and lines[1].startswith("  GPU 0: H200 ")


def test_an_automatic_batch_is_called_so_and_a_resumed_run_too(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000008"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    config = run_config(data__packing=False, batch__samples=32)
    found = facts(llama_8b(), gpus=1, data=data_facts(longest=2048))
    lines = summary(config, found, resume=True, folder=str(tmp_path))
    assert lines[3].startswith("[train] Auto-calculated batch size: ")
    assert lines[-1] == "[train] Resuming from step 8: lora single run with bf16 precision on 1 GPU"
    assert summary(config, found, starts=False) == lines[:-1]


def test_on_a_cpu_no_gpu_is_claimed_and_of_packs_no_number():
    config = run_config(batch__samples=32, parallel__gpus=2)
    found = facts(llama_8b(), host_bytes=900 * GIB, data=data_facts(longest=2048))
    lines = summary(config, found)
    assert lines[0] == "[train] Detected 0 GPUs" and not any("VRAM" in line for line in lines)
    assert lines[1].startswith("[train] Auto-calculated batch size: packs of up to ") and "per process" in lines[1]
    assert lines[1].endswith("accumulation: as many packs as the samples of a step fill")
    assert lines[-1].endswith("with fp32 precision on 2 CPU processes")


def test_a_batch_of_loss_tokens():
    config = run_config(batch__loss_tokens=5000)
    found = facts(llama_8b(), gpus=1, data=data_facts(steps_of_epochs=(30,), first_lengths=(300,), first_labels=(150,)))
    assert "[train] Effective batch size: at least 5,000 loss tokens" in summary(config, found)


def test_a_batch_of_packs():
    found = facts(llama_8b(), gpus=1, data=data_facts(steps_of_epochs=(30,)))
    assert "[train] Effective batch size: 4 packs of 2,048 tokens" in summary(run_config(batch__packs=4), found)
