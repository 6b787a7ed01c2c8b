"""Tensor programs: a few operations on DTensors, compared with the same operations on plain tensors."""
