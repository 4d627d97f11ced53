"""Answers from a trained model: greedy generation, on one process or in step on all ranks."""
