"""Layers: the base class for all kinds, the linear layer, its LoRA adapter, experts, and layers for token models."""
