"""The data link to one peer: in which order messages are sent on it, and flow control."""
