"""Limits: unsupported combinations, each with a reason and a repair to the nearest supported layout or training. No torch."""
