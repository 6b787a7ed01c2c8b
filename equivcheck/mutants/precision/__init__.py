"""Faults in precision, recomputation and shared weights."""
