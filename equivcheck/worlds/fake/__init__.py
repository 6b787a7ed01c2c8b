"""One rank of a world of any size, without peers and without real data."""
