"""Private torch API for DTensor that ranks share, because they run in one process."""
