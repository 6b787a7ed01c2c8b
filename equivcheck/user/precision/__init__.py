"""Users' trainings in mixed precision: a single-device run that rounds like the ranks, or that does not round at all."""
