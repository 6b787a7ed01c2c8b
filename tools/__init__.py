"""Measurements for people who develop equivcheck, run in a checkout: `python -m tools.bench`, `python -m tools.race`."""
