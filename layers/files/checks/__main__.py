"""``python3 <prefix>/checks NAME``: see the package's documentation."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _package() -> None:
    """Make this folder the package ``nrl_checks``, and take it off the path: its names must not hide a tier's."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != folder]
    spec = importlib.util.spec_from_file_location(
        "nrl_checks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nrl_checks"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _package()
    from nrl_checks.cli import main

    sys.exit(main(sys.argv[1:]))
