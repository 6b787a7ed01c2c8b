"""One folder a parallelism: how it is applied, its limits, what it communicates, how scripts write it, its known issues."""
