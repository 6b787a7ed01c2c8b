"""Worker processes: starting, messaging, watching, and ending them with all their children."""
