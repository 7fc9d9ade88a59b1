"""Tests of the native core on host memory."""
