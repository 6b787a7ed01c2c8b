"""History: results from all campaigns in one SQLite file in the store's folder."""
