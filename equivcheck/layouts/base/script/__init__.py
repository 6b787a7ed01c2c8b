"""What parallelisms write exported scripts with; no torch."""
