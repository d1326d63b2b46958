"""This rank in its job: the state that all parts of an endpoint share."""
