"""Data parallelism, wrong on purpose."""
