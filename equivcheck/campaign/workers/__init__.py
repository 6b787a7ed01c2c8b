"""Worker processes of a campaign, and the messages between them and their supervisor."""
