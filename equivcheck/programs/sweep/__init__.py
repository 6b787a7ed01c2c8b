"""Sweeps: every operation under every placement of its arguments on small meshes, and on results of other operations."""
