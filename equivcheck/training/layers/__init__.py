"""Layers: for each kind its parameters, module and exported code."""
