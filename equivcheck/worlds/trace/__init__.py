"""Values recorded by a run, and differences between two runs."""
