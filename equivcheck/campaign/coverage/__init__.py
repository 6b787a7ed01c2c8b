"""Coverage: drawn pairs of features, and possible pairs."""
