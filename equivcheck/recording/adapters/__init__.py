"""Gives tensors names and positions if PyTorch does not know them: handwritten shards, float32 copies, fused weights."""
