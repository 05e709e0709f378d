"""The formats on disk, each known to one module alone."""
