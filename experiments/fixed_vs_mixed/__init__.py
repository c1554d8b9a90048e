"""Fixed against mixed: models of one loop count, evaluated at all, beside one trained at all."""
