"""A smaller scenario that shows the same fault."""
