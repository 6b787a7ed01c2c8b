"""HTML page about a verdict from `check_batching`."""
