"""The trainings of all ranks, emulated on one device."""
