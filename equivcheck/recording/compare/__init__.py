"""Compares two recorded runs."""
