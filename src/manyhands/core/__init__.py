"""What every room may use: errors, atomic files, hashing, progress, collectives."""
