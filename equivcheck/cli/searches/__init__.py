"""Commands that search for errors."""
