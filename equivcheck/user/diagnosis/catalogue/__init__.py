"""Mistakes to try for users' trainings, with a module for each kind."""
