"""Checks for models, parallelizations and data that users bring."""
