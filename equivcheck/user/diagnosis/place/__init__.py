"""Find the first module whose values are wrong."""
