"""Commands for users' own trainings."""
