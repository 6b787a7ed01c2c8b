"""What each parallelism communicates, reckoned from nouns alone: no torch, no ranks."""
