"""The outcome of a check with its evidence, in words and as data."""
