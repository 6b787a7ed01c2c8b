"""What layouts cannot run, with the reason, and the nearest layout or training that they can; no torch."""
