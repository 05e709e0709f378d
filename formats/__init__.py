"""What lies on disk: one file a format, each the only one that knows it."""
