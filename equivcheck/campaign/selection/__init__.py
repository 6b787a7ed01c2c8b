"""Selects cases for checks: with much new coverage for their cost, and few with known issues."""
