"""Links between processes of one host through memory that both map; `link` has the picture."""

__all__: list[str] = []
