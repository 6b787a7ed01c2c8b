"""Adapters for trainers that own optimizer, backward and step, behind one small protocol."""
