"""Compares torch's actual state with a table of how sim treats it: separate per rank, shared, restored or refused."""
