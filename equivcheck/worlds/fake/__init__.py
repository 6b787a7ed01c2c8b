"""One rank of a world of any size, without peers or real data."""
