"""Names the mistake between two recorded runs, from their sketches only."""
