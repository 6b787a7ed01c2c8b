"""Emulates the trainings of all ranks on one device."""
