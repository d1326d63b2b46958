"""How the checked calls of a group become operations, and who may take them before that."""
