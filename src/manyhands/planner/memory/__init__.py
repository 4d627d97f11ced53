"""Bytes that a rank holds, by term."""
