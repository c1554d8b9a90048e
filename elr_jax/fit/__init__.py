"""Whether a full-size model fits a slice of chips, and how fast it can be there at most: compiled, not run."""
