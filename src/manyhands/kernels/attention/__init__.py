"""Causal attention: over rows of one length, and over packs of documents."""
