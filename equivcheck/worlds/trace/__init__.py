"""What a run leaves, moment by moment, and in what ways two runs differ."""
