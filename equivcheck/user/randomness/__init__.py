"""Reproducible random numbers for users' trainings, equal on one device and on ranks."""
