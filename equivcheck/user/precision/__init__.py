"""Trainings of users that compute in several element types: a run on one device that rounds alike, and one that rounds nowhere."""
