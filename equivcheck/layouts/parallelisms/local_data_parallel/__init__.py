"""Explicit data parallelism: plain tensors' gradients are averaged after a step's last backward."""
