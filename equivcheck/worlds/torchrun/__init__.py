"""The world that torchrun has started: each of its processes is a rank, on one or more hosts."""
