"""Communication that each parallelism should cause, computed from the scenario alone: no torch, no ranks."""
