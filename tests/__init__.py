"""Tests of dist_consolidate."""
