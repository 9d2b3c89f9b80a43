"""What every room uses and nothing of a model is in: sizes with symbols, types, units, records,
errors, values as people write them."""
