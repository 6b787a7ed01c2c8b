"""What the operating system gives: files, folders, standard streams, and processes that end with their parent."""
