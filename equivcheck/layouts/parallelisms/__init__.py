"""One folder for each parallelism: its application to a rank, limits, expected calls, export to scripts, and known issues."""
