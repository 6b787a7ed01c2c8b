"""Code shared by all parallelisms: their interface, limits, expected calls, execution and exported scripts."""
