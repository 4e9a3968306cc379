"""Runs the command ``gradcomp`` as ``python -m gradcomp``."""

import sys

from gradcomp.cli import main

sys.exit(main())
