"""Tensor parallelism on plain tensors, with explicit collectives that differentiate."""
