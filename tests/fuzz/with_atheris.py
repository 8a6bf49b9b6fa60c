"""One target under atheris: ``python -m tests.fuzz.with_atheris TARGET [CORPUS] [libFuzzer's options]``.

The corpus folder is filled with the seeds when it is empty; a crash leaves its input in the working folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["oci_builder.model", "oci_builder.wire"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *rest = sys.argv[1:]
    folders = [Path(word) for word in rest if not word.startswith("-")]
    if folders and not any(folders[0].iterdir()):
        from tests.fuzz.corpus import seeds

        for number, data in enumerate(seeds(name)):
            (folders[0] / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *rest], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
