"""Data link to one peer: message order and flow control."""
