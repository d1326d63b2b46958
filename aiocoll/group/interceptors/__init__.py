"""Who takes the calls of a group in place of the engine: blocks, comparison, dry runs and estimates."""
