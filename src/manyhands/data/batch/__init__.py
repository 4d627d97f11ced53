"""Which samples form a step, how they are packed onto ranks, and their batches."""
