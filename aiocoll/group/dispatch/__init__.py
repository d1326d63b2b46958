"""How the checked calls of a group become operations, and the interceptors that may take them before that."""
