"""Known errors of DTensor in tensor programs, each with the smallest program that shows it."""
