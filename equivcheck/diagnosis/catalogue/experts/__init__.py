"""Faults in expert layers."""
