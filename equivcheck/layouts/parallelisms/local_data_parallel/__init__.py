"""Explicit data parallelism: gradients of plain tensors are averaged after a step's last backward."""
