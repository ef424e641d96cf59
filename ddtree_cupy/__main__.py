"""`python -m ddtree_cupy` is the `ddtree` command."""

import sys

from ddtree_cupy.cli import main

sys.exit(main())
