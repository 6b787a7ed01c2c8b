"""Shrinking: search for a smaller case with the same fault."""
