"""Worlds run one function on N ranks, as threads of one process or as real processes."""
