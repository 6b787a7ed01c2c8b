"""The simulated world: each rank is a thread of this process, and exactly one runs at a time."""
