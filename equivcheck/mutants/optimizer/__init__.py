"""Optimizer and schedule, wrong on purpose."""
