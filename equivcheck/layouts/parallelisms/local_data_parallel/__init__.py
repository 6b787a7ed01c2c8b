"""Data parallelism by hand: gradients of plain tensors averaged after a step's last backward."""
