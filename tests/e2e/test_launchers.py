"""The worker under other launchers gives the losses that ``manyhands train --gpus 2`` gives."""

from __future__ import annotations

import pytest

from tests.e2e.runs import NO_VERIFY, Ended, Place, Run
from tests.e2e.test_endings import free_port

WORKER = ("-m", "manyhands.worker", "run.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("torchrun", ("-m", "torch.distributed.run", "--nproc_per_node=2")),
        ("accelerate", ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "PORT")),
    ],
)
def test_two_processes_under_another_launcher(place: Place, whole: tuple[Ended, Run], name: str, command: tuple[str, ...]) -> None:
    command = tuple(str(free_port()) if word == "PORT" else word for word in command)
    ended = place.call(*command, *WORKER, f"name={name}", plant=NO_VERIFY)
    assert ended.code == 0 and ended.output.count("finished: ") == 1, ended.output
    assert place.run(name).read("plans/001.json")["world_size"] == 2
    assert place.run(name).course() == whole[1].course()
    again = place.call(*command, *WORKER, f"name={name}")
    assert again.code == 0 and place.run(name).course() == whole[1].course()


@pytest.mark.slow
def test_a_mistake_is_shown_once_under_torchrun(place: Place) -> None:
    ended = place.call("-m", "torch.distributed.run", "--nproc_per_node=2", *WORKER, "data.train=none.jsonl")
    assert ended.code != 0 and ended.output.count("error: no such data file") == 1, ended.output


@pytest.mark.slow
def test_one_process_by_hand(place: Place) -> None:
    ended = place.call(*WORKER, "name=by-hand")
    assert ended.code == 0 and "reopened by PeftModel.from_pretrained" in ended.output, ended.output
    assert len(place.run("by-hand").losses()) == 12
