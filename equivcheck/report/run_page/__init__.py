"""HTML page about one `equivcheck fuzz` campaign."""
