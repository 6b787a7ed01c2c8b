"""What each parallelism puts into a script; one module each."""
