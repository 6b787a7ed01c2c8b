"""Commands about stored findings."""
