"""Update rules: replace, residual, delta and adaptive delta beside a plain model, at every loop count."""
