"""Commands on findings."""
