"""Records the traces of users' trainings: tensors by name, optimizer settings, and summary numbers."""
