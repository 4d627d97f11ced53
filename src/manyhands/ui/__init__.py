"""``manyhands ui``: a page that shows the runs of a folder. It reads their files, and a run never depends on it."""
