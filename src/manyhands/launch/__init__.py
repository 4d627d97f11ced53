"""From plan to processes: run folders, local ranks, other launchers, watching. Knows no model; imports torch only while
it launches.
"""
