"""Run a scenario on ranks and on a single device, compare both runs, and return a verdict."""
