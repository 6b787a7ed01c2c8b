"""The oracle: runs the reference, measures the noise floor, compares, and gives a verdict."""
