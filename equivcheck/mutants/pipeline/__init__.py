"""Faults in pipelines."""
