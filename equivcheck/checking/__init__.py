"""The public check: a scenario or a tensor program in, a verdict out."""
