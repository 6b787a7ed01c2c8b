"""Compiling and tracing on each rank."""
