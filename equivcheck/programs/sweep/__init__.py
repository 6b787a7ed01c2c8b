"""Sweeps: every operation under every argument placement on small meshes, and on other operations' results."""
