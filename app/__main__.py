"""``python -m app`` is the command ``specduel``."""

import sys

from app.cli import main

sys.exit(main())
