"""The command `python -m tests.planted`, which runs the mutation tests of `tests.planted.run`."""

import sys

from .run import main

sys.exit(main())
