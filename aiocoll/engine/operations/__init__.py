"""The operations that a group has in flight: one executor class for each way to carry out a collective."""
