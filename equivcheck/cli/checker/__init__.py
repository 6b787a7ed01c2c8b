"""Commands about the checker itself."""
