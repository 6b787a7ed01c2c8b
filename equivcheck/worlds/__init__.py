"""Worlds: N ranks that can run a function, as threads in simulation or as real processes."""
