"""manyhands: multi-GPU fine-tuning that is planned before it is launched and proves what it says."""

__version__ = "0.1.0"
