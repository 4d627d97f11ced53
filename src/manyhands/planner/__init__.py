"""From what was asked and what is true to what will be done: pure functions, without torch, files or network."""
