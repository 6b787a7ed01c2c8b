"""Faults in context parallelism."""
