"""Data parallelism by DTensor propagation only."""
