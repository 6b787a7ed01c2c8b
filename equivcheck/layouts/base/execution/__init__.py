"""Compiling, tracing and activation checkpointing on each rank."""
