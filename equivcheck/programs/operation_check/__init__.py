"""The check of an operation that a user brings, under all placements of what it takes."""
