"""The state of a rank in its job, shared by all parts of an endpoint."""
