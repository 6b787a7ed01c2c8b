"""Operating system helpers: files, folders, standard streams, and processes that end with their parent."""
