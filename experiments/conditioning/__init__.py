"""Conditioning: what telling layers the progress and the budget brings, and which way in matters."""
