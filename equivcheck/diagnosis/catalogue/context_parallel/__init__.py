"""Known mistakes in context parallelism."""
