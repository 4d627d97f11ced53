"""Restarting after a fault, on fewer GPUs or nodes where some are lost."""
