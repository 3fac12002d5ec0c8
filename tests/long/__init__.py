"""Tests that take too long for every run: with DIST_CONSOLIDATE_LONG=1 they run as well."""

import os

IS_LONG = os.environ.get("DIST_CONSOLIDATE_LONG", "") not in ("", "0")
