"""Which pairs of features generated scenarios have, and which they could have."""
