"""Records the trainings of checks, so that recordings can be compared with verdicts."""
