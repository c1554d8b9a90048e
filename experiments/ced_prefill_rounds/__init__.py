"""Prompts read in fewer rounds than what is generated after them."""
