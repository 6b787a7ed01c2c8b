"""Coverage: pairs of features in generated scenarios, and the pairs that are possible."""
