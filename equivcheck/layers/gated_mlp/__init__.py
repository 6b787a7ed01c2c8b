"""Gated multi-layer perceptrons."""
