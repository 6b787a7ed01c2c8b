"""Layouts: how each parallelism is applied to a training, and what it cannot run."""
