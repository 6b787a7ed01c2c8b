"""Reports on campaigns and checks, for people and programs."""
