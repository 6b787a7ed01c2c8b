"""Mistakes in any training."""
