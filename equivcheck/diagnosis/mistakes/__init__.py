"""Mistakes that can occur in any training."""
