"""A linear with a norm before it, and what comes after it: the layer of `equivcheck.scenario.Layer`."""
