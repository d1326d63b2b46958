"""`aiocoll top`: the activity of a running job's ranks, on a terminal, as JSON, or on a web page."""
