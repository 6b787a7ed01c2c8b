"""Selftest: generated scenarios with mutants, which are planted bugs."""
