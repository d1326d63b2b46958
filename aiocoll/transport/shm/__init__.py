"""Links in shared memory between processes of one host; see `link` for an overview."""

__all__: list[str] = []
