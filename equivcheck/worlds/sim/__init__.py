"""The simulated world: each rank is a thread in this process, and exactly one runs at a time."""
