"""Campaigns that measure the CPU time to the first catch of each mutant."""
