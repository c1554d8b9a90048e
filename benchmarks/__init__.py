"""Timings of both sides of a claim in one process: `python -m benchmarks.<name>`."""
