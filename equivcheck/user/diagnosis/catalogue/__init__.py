"""Candidate mistakes for users' trainings, one module per kind."""
