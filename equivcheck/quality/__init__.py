"""Measurements for the checker itself: mutants, other torch versions, this machine."""
