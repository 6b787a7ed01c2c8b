"""The public `check`: takes a scenario or a tensor program and returns a verdict."""
