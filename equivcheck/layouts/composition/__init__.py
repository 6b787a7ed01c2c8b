"""What reads all parallelisms: the registry, limits of a whole layout, its expected calls, and running it on ranks."""
