"""Weights in NF4 back to floating point."""
