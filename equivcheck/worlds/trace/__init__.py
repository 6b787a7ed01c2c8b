"""Values that a run records, and the ways in which two runs can differ."""
