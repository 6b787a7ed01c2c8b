"""A campaign's progress and its summary, as text and as JSON values."""
