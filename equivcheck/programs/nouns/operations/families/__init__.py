"""One module for each family of operations."""
