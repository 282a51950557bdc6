"""`python -m rankmesh`."""

import sys

from rankmesh.cli.main import main

sys.exit(main())
