"""`aiocoll top`: what the ranks of a running job do, on a terminal, as JSON, or on a page."""
