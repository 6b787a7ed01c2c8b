"""Selftests and races for people and as data."""
