"""Faults in sharded parameters and optimizer state."""
