"""How the ranks of a group decide together who goes on after a failure or a growth."""
