"""The command `python -m tests.planted`; see `tests.planted.run`."""

import sys

from .run import main

sys.exit(main())
