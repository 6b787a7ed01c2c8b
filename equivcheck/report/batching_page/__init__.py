"""HTML page about a step over the same examples in other batches."""
