"""Which state of torch sim keeps apart, shares, restores or refuses, held against what torch has."""
