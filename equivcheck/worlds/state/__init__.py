"""State that a program can leave changed behind it: what it is, how it is read, and how it is put back."""
