"""Mutants: parallel trainings with a planted fault, which test the checker."""
