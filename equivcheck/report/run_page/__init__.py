"""A run of `fuzz` as one HTML page."""
