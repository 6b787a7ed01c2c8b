"""How good the checker is: generated scenarios against trainings that are wrong on purpose."""
