"""Loop distribution: which loop counts training needs, and what the third and fourth are for."""
