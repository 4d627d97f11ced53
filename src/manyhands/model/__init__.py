"""The model in one process: loading, attention, loss, adapters. Must not know data files, ranks or the loop."""
