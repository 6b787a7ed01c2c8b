"""Faults in gradient clipping. They show only if clipping is active, and gradients differ only after it."""
