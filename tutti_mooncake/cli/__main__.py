"""`python -m tutti_mooncake.cli`: the same as `tutti`."""

import sys

from tutti_mooncake.cli.main import main

sys.exit(main())
