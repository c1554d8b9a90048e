"""Training: data, optimizer, the train step, checkpoints, metrics, evaluation and the runner that joins them."""
