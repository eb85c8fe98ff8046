"""Run the command line: ``python -m saltflat``."""

import sys

try:
    from saltflat.cli import main

    main()
except KeyboardInterrupt:
    print("Interrupted.", file=sys.stderr)
    sys.exit(130)
