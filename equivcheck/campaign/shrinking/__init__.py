"""Shrinking: the search for a smaller case with the same failure."""
