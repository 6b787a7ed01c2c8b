"""State left changed by programs, with functions to read and restore it."""
