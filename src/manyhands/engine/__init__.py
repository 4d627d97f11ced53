"""Functions that are applied to a model so that many processes train it as one. Must not know the data."""
