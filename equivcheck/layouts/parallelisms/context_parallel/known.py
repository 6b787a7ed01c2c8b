"""Context parallelism has no issue on file: its collectives are written here."""
