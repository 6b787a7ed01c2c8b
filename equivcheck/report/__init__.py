"""Reports on campaigns and checks, as text, HTML pages and JSON."""
