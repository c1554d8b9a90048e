"""Copies beyond the window: the stacks of the loop's place."""

from experiments.ced_loop_placement.cells import cells

__all__ = ["cells"]
