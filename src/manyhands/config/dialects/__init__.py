"""Run files and settings of other tools."""
