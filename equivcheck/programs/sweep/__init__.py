"""Sweeps: run every operation under all argument placements, on small meshes, also on other operations' results."""
