"""Assemble full tensors from the ranks' shards, and compare tensors and communication with the single-device run."""
