"""`python -m outsize` is the same as the `outsize` command."""

import sys

from outsize.cli import main

sys.exit(main())
