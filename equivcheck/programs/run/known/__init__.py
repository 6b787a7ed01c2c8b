"""Known DTensor errors in tensor programs, each with the smallest program that shows it."""
