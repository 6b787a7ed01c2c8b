"""Faults in gradient clipping. They show only if clipping is active, and only in gradients after it."""
