"""How the ranks of a group agree on which of them continue after a failure or a growth."""
