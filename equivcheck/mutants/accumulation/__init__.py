"""Faults in gradient accumulation and loss normalisation."""
