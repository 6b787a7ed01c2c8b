"""Campaigns on several machines. Each machine starts its own worker processes, and one bridge process relays their messages."""
