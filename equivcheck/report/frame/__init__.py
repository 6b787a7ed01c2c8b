"""What all HTML pages share: the base template and its style, charts, and how a page is put together."""
