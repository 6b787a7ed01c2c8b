"""HTML page about a `fuzz` run."""
