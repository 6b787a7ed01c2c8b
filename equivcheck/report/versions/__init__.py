"""HTML page that compares torch versions."""
