"""Layouts: how a training is distributed over a mesh, by one parallelism or a composition of them."""
