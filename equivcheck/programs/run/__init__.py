"""Tensor programs run: on one device, on ranks, and as scripts that need torch alone."""
