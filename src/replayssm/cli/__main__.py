"""`python -m replayssm.cli` is the `replayssm` command."""

import sys

from replayssm.cli.app import main

sys.exit(main())
