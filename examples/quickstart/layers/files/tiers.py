"""Does a tier's interpreter find its own packages? Run by each tier's Python; prints one JSON line."""

import json
import sys
from importlib.metadata import version

import numpy
import pydantic
import rich  # noqa: F401
import safetensors.numpy


def main() -> None:
    """Use each package once and compare its version with what the command line says."""
    wanted = dict(item.split("==") for item in sys.argv[1:])
    wrong = {name: version(name) for name, expected in wanted.items() if version(name) != expected}
    model = pydantic.create_model("Point", x=(int, ...), y=(int, ...))
    point = model.model_validate({"x": "3", "y": 4})
    data = safetensors.numpy.save({"v": numpy.array([point.x, point.y])})
    total = int(safetensors.numpy.load(data)["v"].sum())
    good = not wrong and total == 7 and sys.prefix.startswith("/opt/quickstart/envs/")
    print(json.dumps({"outcome": "pass" if good else "fail", "reason": f"{sys.prefix}: total {total}, wrong {wrong}"}))


main()
