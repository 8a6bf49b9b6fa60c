"""A process that has imported everything, and forks one child for each command line that it is told.

So two hundred runs of the real program cost two hundred forks and not two hundred starts of Python. It speaks lines of
JSON: in ``{"argv", "env", "log"}``, out ``{"pid"}`` and then ``{"status"}`` (as ``waitpid`` gives it).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def child(order: dict[str, Any]) -> None:
    """Be oci-builder with these arguments."""
    # Before any other call: the library that makes calls fail reads them at the first.
    os.environ.update(order["env"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["oci-builder", *order["argv"]]
    from oci_builder.cli import main

    main()


def serve() -> None:
    """Until the input ends."""
    import oci_builder.build
    import oci_builder.cli.images
    import oci_builder.pull
    import oci_builder.unpack
    import oci_builder.verify  # noqa: F401

    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                child(order)
                status = 0
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            except BaseException:
                import traceback

                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    serve()
