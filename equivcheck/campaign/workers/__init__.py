"""Worker processes, and the messages between them and the supervisor."""
