"""Notes, hints and texts about failures, for users."""
