"""What was asked: the schema of a run file, reading it, and explaining its keys. Knows no torch."""
