"""The world started by torchrun: each of its processes is a rank, on one or more hosts."""
