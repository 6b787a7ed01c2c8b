"""Assemble full tensors from what ranks hold, and compare tensors and communication with the reference."""
