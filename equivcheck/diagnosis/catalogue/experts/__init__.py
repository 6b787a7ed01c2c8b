"""Layers of experts that route or learn otherwise."""
