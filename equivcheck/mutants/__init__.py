"""Parallel trainings that are wrong on purpose: what the checker is judged by."""
