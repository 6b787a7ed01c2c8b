"""Tensor parallelism on plain tensors has no issue on file: its collectives are written here."""
