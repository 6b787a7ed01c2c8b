"""Scenarios as JSON, both ways: the present format, and older ones converted."""
