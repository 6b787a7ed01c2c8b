"""Watches a training process: hooks and replaced functions that read values and change none."""
