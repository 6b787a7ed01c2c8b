"""Trainings of users that compute in several element types: one device that rounds as ranks do, or none that rounds at all."""
