"""Campaigns on several machines at once: each starts its own worker processes, and one bridge relays what they say."""
