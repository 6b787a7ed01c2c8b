"""Operations for tensor programs: a table for each family."""
