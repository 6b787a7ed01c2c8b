"""One rank's side in a simulated process group."""
