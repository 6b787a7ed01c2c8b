"""What campaigns left, run by run: one SQLite file beside the findings of a store."""
