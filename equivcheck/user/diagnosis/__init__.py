"""Finds out why a user's training diverged, and in which module, after the run and on one device."""
