"""Point-to-point messages: sends, receives, and the matching of sends with receives."""
