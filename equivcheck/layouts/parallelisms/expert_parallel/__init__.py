"""Expert parallelism: each rank has some experts. Rows are sent to their experts' ranks and back."""
