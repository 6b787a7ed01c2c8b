"""The history: results of all campaigns, in one SQLite file in the store's folder."""
