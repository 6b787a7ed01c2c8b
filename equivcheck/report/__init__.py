"""What people and programs read of a campaign: listeners of its events."""
