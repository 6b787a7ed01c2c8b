"""DTensor internals that ranks share, because they run in one process."""
