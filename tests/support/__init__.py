"""Tiny models and an n-rank world for tests, and the measurement of equality. Not imported by the product."""
