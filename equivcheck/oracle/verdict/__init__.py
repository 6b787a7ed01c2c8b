"""Verdicts: outcome and evidence, as text and as data."""
