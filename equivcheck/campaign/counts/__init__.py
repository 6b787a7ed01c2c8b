"""Counts: workers collect them, the supervisor adds them up."""
