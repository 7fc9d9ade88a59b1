"""Serving benchmarks of the real engine on cards: models, servers, loads and what they are measured by."""

import sys
from pathlib import Path

# The models are described once, beside the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
