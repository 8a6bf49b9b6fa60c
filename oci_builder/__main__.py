"""The console script, and ``python -m oci_builder``: Ctrl-C while the rest is loaded ends it as it does later."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it. Loading takes half a second, and many on a slow file system."""
    try:
        from oci_builder.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
