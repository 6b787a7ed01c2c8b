"""What rotary positions turn by."""

ROTARY_BASE = 100.0
"""From one pair of features of a head to the last, rates fall from 1 to nearly one part in so many: short, as sequences are."""
