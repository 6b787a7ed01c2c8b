"""Trainers that own optimizer, backward and step, behind one small protocol."""
