"""What DTensor is known to do wrong in tensor programs, and the smallest program that shows each."""
