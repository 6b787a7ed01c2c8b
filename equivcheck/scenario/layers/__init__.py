"""Layers: the base class for all kinds, the linear layer, experts, and layers for token models."""
