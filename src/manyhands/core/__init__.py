"""What every package may use: errors, atomic files, hashing, progress, collectives."""
