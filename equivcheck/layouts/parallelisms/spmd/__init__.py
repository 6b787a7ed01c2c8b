"""Data parallelism by DTensor propagation alone."""
