"""What faults do to a training run, tried on real processes: `python -m benchmarks.faults`."""
