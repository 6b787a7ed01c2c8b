"""Faults in expert layers and expert parallelism."""
