"""What a group has in flight: the executors of collectives."""
