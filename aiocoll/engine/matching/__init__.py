"""Messages between two ranks: sends, receives, and which of them belong together."""
