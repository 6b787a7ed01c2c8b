"""Worlds run one function on N ranks, as threads in one process or as real processes."""
