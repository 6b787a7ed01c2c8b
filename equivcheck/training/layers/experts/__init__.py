"""Experts that a router chooses among."""
