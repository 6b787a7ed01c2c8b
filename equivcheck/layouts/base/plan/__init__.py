"""Plans of tensor parallelism: which of them can run, how each module computes under one, and the calls that follow."""
