"""Checks whether a training step computes the same if its examples are batched in another way."""
