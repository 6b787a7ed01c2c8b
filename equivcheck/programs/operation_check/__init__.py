"""`check_operation`: checks a user's operation under all placements of its inputs."""
