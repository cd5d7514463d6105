"""Sources of conversations: names, readers, filters and order."""
