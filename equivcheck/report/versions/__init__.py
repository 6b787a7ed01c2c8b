"""Torch version matrix as a page."""
