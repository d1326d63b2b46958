"""The data link to one peer: what goes to it in which order, and how much may wait there."""
