"""HTML page about two recorded runs."""
