"""The operations of tensor programs, as facts: a folder of families, each a table."""
