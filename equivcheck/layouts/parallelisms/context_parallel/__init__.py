"""Context parallelism, by collectives on plain tensors."""
