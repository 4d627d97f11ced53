"""What is true of the world: the model's dimensions, the data's lengths, this machine. Read once, then frozen."""
