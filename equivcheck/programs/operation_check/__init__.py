"""`check_operation`: checks a user's operation under all input placements."""
