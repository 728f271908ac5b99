"""`python -m steplab` is the command line."""

import sys

from steplab.cli.main import main

sys.exit(main())
