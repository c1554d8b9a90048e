"""Copies of a passage from beyond the window, by the place of the loop."""
