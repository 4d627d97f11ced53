"""Token streams on disk: what a sample carries, segments, the store that a run reads."""
