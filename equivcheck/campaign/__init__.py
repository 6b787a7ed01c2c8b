"""Long fuzzing: worker processes, their supervision, a budget, and what they found."""
