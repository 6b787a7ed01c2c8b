"""Trainings that save a checkpoint, and continue from it."""
