"""From a run file, ours or another tool's, to a ``RunConfig``. An importer per tool maps keys, or refuses them."""
