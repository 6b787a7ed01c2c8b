"""One rank's side of a simulated process group."""
