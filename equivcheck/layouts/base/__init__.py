"""The code that all parallelisms share: their interface, limits, expected calls, execution and exported scripts."""
