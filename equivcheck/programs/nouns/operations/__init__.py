"""The operations of tensor programs: a table for each family."""
