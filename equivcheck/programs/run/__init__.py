"""Runs tensor programs on one device, on ranks, and as scripts that need only torch."""
