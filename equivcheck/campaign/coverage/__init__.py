"""Coverage: pairs of features in generated scenarios, and the possible pairs."""
