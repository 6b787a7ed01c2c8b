"""Commands for one case."""
