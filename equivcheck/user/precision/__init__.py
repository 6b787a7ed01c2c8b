"""Trainings in mixed precision: a single-device run that rounds like the ranks, or one that does not round at all."""
