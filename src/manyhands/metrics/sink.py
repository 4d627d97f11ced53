"""The contract of a sink: a hook that also hears of the devices and is closed at the end. Rank 0 alone has sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manyhands.train.types import Hook

Devices = Sequence[Mapping[str, float]]  # what ``meters.Meter.read`` gave on each rank, in rank order


class Sink(Hook):
    def record_devices(self, step: int, devices: Devices) -> None:
        """Called just before ``after_step`` of the same step, at steps that are logged."""

    def show_progress(self, stage: str, done: int, total: int) -> None:
        """What the run does between steps (evaluation, samples, checkpoint), and how much of it is done; ``done ==
        total`` ends it.
        """

    def close(self) -> None:
        """Called once, also when the run failed."""
