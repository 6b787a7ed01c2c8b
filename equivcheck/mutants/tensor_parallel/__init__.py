"""Faults in tensor and sequence parallelism."""
