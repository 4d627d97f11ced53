"""From plan to processes: run folders, local ranks, other launchers, watching. Imports torch only to launch."""
