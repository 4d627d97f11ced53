"""Long work reports progress at each tensor, file and token: the launcher's watch ends what does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint import load_checkpoint, save_checkpoint
from manyhands.checkpoint.manifest import hash_file
from manyhands.core import progress
from manyhands.export import verify_process
from manyhands.export.adapter import export_adapter
from manyhands.export.model import export_model
from manyhands.infer.decode import complete
from manyhands.infer.settings import GenerationSettings
from manyhands.model.load import match_checkpoint, read_weights
from tests.export.tiny import METHOD, adapt, make_model, save_source
from tests.support.zygote import forking


@contextmanager
def counting() -> Iterator[list[int]]:
    count = [0]

    def listener() -> None:
        count[0] += 1

    progress.listen(listener)
    try:
        yield count
    finally:
        progress.listen(None)


def advances(work: Callable[[], object]) -> int:
    with counting() as count:
        work()
    return count[0]


def test_reading_weights(tmp_path: Path) -> None:
    model = make_model()
    source = save_source(tmp_path / "source", model)
    num_tensors = len(dict(model.named_parameters()))
    checkpoint = match_checkpoint(model, str(source))
    assert advances(lambda: read_weights(model, checkpoint)) >= num_tensors


def test_saving_and_loading_a_checkpoint(tmp_path: Path) -> None:
    model = make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    num_tensors = 4 * len(dict(model.named_parameters()))  # the weight, two moments, the step
    save = advances(lambda: save_checkpoint(tmp_path / "step-000001", model, optimizer, {}, rank=0, world_size=1))
    load = advances(lambda: load_checkpoint(tmp_path / "step-000001", model, optimizer))
    assert save >= num_tensors and load >= num_tensors


def test_hashing_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    assert advances(lambda: hash_file(path)) >= 1


def test_exporting(tmp_path: Path) -> None:
    model = make_model().eval()
    source = save_source(tmp_path / "source", model)
    num_tensors = len(dict(model.named_parameters()))
    assert advances(lambda: export_model(tmp_path / "model", model, source, "float32", rank=0)) >= num_tensors
    adapted = adapt(make_model()).eval()
    num_factors = sum("lora_" in name for name, _ in adapted.named_parameters())
    assert advances(lambda: export_adapter(tmp_path / "adapter", adapted, METHOD, str(source), rank=0)) >= num_factors


def test_answering_a_prompt() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], **options: object) -> str:
            return " ".join(map(str, ids))

    settings = GenerationSettings(max_new_tokens=7)
    assert advances(lambda: complete(make_model(), Tokenizer(), [[1, 2, 3]], settings, ())) >= 7


def verify_by(monkeypatch: pytest.MonkeyPatch, command: list[str], stop: Callable[[], bool]) -> tuple[str, str] | None:
    monkeypatch.setattr(verify_process, "POLL_S", 0.05)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = verify_process._wait(process, stop)
    assert process.poll() is not None, "no process is left"
    return said


def test_a_verification_that_computes_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting() as count:
        assert verify_by(monkeypatch, [sys.executable, "-c", "while True: pass"], lambda: count[0] >= 5) is None


def test_a_verification_that_hangs_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    polls = iter(range(40))
    with counting() as count:
        assert verify_by(monkeypatch, ["sleep", "600"], lambda: next(polls) == 39) is None
    assert count[0] <= 3, "only its start"


TWO_RANKS = """
import datetime, os, sys, time
import torch.distributed as dist
from manyhands.core import progress
from manyhands.core import collective_errors

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=12))

def work(advancing):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if advancing:
            progress.advance()
    return "done"

try:
    first = collective_errors.run_on_rank_0(lambda: work(sys.argv[3] == "advancing"))
    print(first, collective_errors.run_on_rank_0(lambda: 7), flush=True)
except RuntimeError as error:
    print("Timed out" in str(error) or "closed" in str(error), flush=True)
os._exit(0)
"""


@pytest.mark.ci
@pytest.mark.distributed
def test_ranks_wait_for_the_first_one_for_as_long_as_it_advances(tmp_path: Path) -> None:
    """Twenty seconds of work on rank 0 in a process group whose timeout is twelve: only work that advances keeps it.
    Both are waited for at once.
    """
    said = {"advancing": ["done 7", "None None"], "hanging": ["True", "True"]}
    with forking():
        ranks = {
            how: [
                subprocess.Popen(
                    [sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / how), how],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(2)
            ]
            for how in said
        }
    assert {how: [rank.communicate(timeout=240)[0].strip() for rank in both] for how, both in ranks.items()} == said
