"""Data link to one peer: the order of messages on it, and flow control."""
