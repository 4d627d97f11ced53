"""What experts compute around their grouped products: tokens sorted by expert, low-rank updates, the gate."""
