"""Scripts that show a scenario with torch alone."""
