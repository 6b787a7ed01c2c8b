"""Watches a training process: hooks and replaced functions read values and change none."""
