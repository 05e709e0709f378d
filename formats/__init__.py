"""The formats on disk: one file for each, the only one that knows it."""
