"""Faults in optimizers and schedules."""
