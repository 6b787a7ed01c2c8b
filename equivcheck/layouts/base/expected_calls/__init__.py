"""Expected communication for each parallelism, computed from the scenario alone: no torch, no ranks."""
