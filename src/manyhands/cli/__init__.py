"""The command line: one file a command, thin; what a command does stands in the rooms below. Knows no torch.

Everything heavy is imported inside the commands, so that ``manyhands --help`` answers at once. A command that needs
torch starts a process of its own (``cli/process.py``).
"""
