"""One rank's side of a process group, by what is asked of it."""
