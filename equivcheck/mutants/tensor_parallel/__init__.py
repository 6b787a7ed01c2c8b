"""Tensor and sequence parallelism, wrong on purpose."""
