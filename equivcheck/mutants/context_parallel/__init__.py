"""Positions of sequences cut over ranks, wrong on purpose."""
