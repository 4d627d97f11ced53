"""Seconds of a step, by term."""
