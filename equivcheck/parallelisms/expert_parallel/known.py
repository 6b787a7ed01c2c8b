"""Expert parallelism has no issue on file of its own."""
