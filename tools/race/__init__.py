"""Campaigns that measure the CPU time to each mutant's first catch."""
