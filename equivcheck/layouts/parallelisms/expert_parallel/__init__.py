"""Experts shared out over ranks, to which rows are sent and from which they come back."""
