"""AdamW in one kernel."""

from manyhands.kernels.adamw.optimizer import FusedAdamW
from manyhands.kernels.adamw.select import choose_backend

__all__ = ["FusedAdamW", "choose_backend"]
