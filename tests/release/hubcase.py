"""The lab's hub as a target, without xet and with a token."""

from __future__ import annotations

from oci_builder.release.publish import HubTarget
from tests.lab.hub import TOKEN, FakeHub


def target(hub: FakeHub, **changes: object) -> HubTarget:
    values = {"repo": "o/r", "endpoint": hub.url, "xet": False, "env": {"HF_TOKEN": TOKEN, "HF_HOME": "/nonexistent"}}
    return HubTarget(**{**values, **changes})  # type: ignore[arg-type]
