"""Entry point of `python -m aiocoll`, the same as the command `aiocoll`."""

import sys

from aiocoll.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
