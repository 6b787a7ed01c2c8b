"""One rank of a world as large as one likes: no peers, no data."""
