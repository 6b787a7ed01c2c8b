"""The base of all parallelisms: their kind, limits, expected calls, execution and scripts."""
