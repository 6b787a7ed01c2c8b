"""Precision, recomputation and shared weights, wrong on purpose."""
