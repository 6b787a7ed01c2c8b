"""Faults in gradient accumulation."""
