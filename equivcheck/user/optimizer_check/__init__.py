"""Checks a distributed or handwritten optimizer against one device."""
