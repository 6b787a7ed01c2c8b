"""Putting full tensors together from what ranks hold, and comparing them, and what ranks communicate, with what is expected."""
