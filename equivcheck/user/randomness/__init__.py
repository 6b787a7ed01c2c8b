"""What users' trainings draw at random: the same on every run, and on one device as on ranks."""
