"""Why a training of a user diverged, and in which module: found after the fact, on one device."""
