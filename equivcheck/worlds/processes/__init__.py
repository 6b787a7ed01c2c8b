"""Creates processes, and prepares them for ranks."""
