"""From the model in memory to files that transformers and PEFT open, and the proof that they hold the same numbers."""
