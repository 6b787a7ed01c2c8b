"""Emulate all ranks' trainings on one device."""
