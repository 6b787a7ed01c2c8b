"""Code that combines all parallelisms: the registry, limits for a whole layout, its expected calls, and runs on ranks."""
