"""Building blocks for exported scripts, shared by all parallelisms. No torch."""
