"""Sequences whose positions are cut over ranks, and looked at, labelled or added up otherwise."""
