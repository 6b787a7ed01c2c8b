"""The world that torchrun has started: each of its processes is a rank, on as many hosts as there are."""
