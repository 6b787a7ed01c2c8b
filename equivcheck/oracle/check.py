"""`check`: one scenario, one verdict."""
