"""Common parts for all HTML pages: base template, style and charts."""
