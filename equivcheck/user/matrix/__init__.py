"""One training under many layouts, in a table with a row for each."""
