"""Launchers of several nodes: finding each other, comparing what they were given, starting together."""
