"""The judge: runs a scenario and its reference, compares, and gives a verdict."""
