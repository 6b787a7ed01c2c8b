"""Tensor programs on plain tensors: collectives change placements, and operations run on shards if their rule allows it."""
