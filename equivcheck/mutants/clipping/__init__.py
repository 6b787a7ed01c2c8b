"""Gradient clipping, wrong on purpose: it shows where clipping is active, and in gradients only after it."""
