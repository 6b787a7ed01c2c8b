"""State that a program can leave changed, with functions to read and restore it."""
