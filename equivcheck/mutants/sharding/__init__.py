"""Sharded parameters and optimizer state, wrong on purpose."""
