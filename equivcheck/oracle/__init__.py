"""Run a scenario and its single-device reference, compare them, and return a verdict."""
