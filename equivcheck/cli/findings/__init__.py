"""Commands on what has been found."""
