"""Linear layer, `equivcheck.scenario.Layer`."""
