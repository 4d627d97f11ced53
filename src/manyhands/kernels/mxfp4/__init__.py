"""Weights in MXFP4 to floating point."""
