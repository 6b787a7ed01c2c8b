"""Experts that a router chooses among, and their sharing out over ranks, wrong on purpose."""
