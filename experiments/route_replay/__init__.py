"""Route replay: experts chosen anew in every round, or those of the first."""
