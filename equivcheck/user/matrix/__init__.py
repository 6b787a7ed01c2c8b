"""One training of a user under many layouts: a row of a table for each."""
