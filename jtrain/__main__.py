"""`python -m jtrain`."""

import sys

from jtrain.cli.main import main

sys.exit(main())
