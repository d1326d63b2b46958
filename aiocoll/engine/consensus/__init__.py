"""Agreement of a group's ranks on the members that continue after a failure, or after newcomers join."""
