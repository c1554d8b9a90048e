"""Whether a cache of the last round alone is enough, after stochastic and after fixed training."""
