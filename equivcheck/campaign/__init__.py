"""Fuzzing campaigns: worker processes, their supervisor, and the findings."""
