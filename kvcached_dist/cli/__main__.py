"""``python -m kvcached_dist.cli``."""

import sys

from . import main

sys.exit(main())
