"""Operating system helpers: files, folders, standard streams, and processes tied to their parent."""
