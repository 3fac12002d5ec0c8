"""``python -m dist_consolidate``."""

from __future__ import annotations

import sys

from dist_consolidate.cli import main

if __name__ == "__main__":
    sys.exit(main())
