"""The ways in which a user's training may be wrong, a module a kind."""
