"""Faults in data parallelism."""
