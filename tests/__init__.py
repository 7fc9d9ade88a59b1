"""Tests of kvcached_dist, in lanes; see :mod:`tests.lanes`."""
