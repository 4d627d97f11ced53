"""The command line: thin commands; the work is done in the packages below. Knows no torch.

Heavy imports are inside the commands, so that ``manyhands --help`` answers at once. A command that needs torch starts a
process (``process.py``).
"""
