"""Runs tensor programs on one device, on ranks, and as scripts requiring only torch."""
