"""Tensor programs on plain tensors: collectives where placements change, and operations where each rank's part is enough."""
