"""Traces of users' trainings: tensors by canonical name, optimizer settings, and summary numbers."""
