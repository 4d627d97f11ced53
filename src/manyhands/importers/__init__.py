"""From a run file, ours or another tool's, to a ``RunConfig``: one file, or folder, for each tool whose files are read.

An importer maps the keys of one tool to ours, or refuses them with a reason; it knows our schema and reads no data.
"""
