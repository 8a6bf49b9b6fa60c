"""What the release tests share: a key, a policy, and receipts of any shape."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

from oci_builder.model.gates import TrustedKey, TrustPolicy
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE, Check, Gpu, Host, Receipt
from oci_builder.release.receipts import make_statement
from oci_builder.release.signing import SigningKey, new_key

SUBJECTS = {PORTABLE: "a" * 64, OCI: "b" * 64, DOCKER: "c" * 64}
NOW = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
B200 = "NVIDIA B200"


def trusted(key: SigningKey, **changes: Any) -> TrustedKey:
    """``key`` as an entry of a policy, valid in 2026."""
    values: dict[str, Any] = {
        "name": "bench", "public": base64.b64encode(key.public).decode(),
        "not_before": "2026-01-01T00:00:00Z", "not_after": "2026-12-31T23:59:59Z", **changes,
    }  # fmt: skip
    return TrustedKey.model_validate(values)


def policy(*keys: TrustedKey) -> TrustPolicy:
    """A policy of these keys."""
    return TrustPolicy(keys=keys)


def gpus(count: int, name: str = B200, capability: str = "10.0") -> tuple[Gpu, ...]:
    """``count`` different GPUs."""
    return tuple(Gpu(name=name, uuid=f"GPU-{i}", capability=capability) for i in range(count))


def checks(**outcomes: str) -> tuple[Check, ...]:
    """Checks by name (``_`` stands for ``-``) and outcome."""
    return tuple(
        Check.model_validate({"name": n.replace("_", "-"), "outcome": o, "reason": "" if o == "pass" else "because"})
        for n, o in outcomes.items()
    )


def receipt(stage: str = "container", **changes: Any) -> Receipt:
    """A receipt of stage ``stage`` with one passed check."""
    values: dict[str, Any] = {
        "release": "v1-r1", "stage": stage, "attempt": "a1", "engine": "local",
        "tools": {"oci-builder": "0.1.0"}, "host": Host(os="ubuntu 22.04", kernel="6.1.0"),
        "started": "2026-05-01T10:00:00Z", "finished": "2026-05-01T10:05:00Z", "checks": checks(ok="pass"), **changes,
    }  # fmt: skip
    return Receipt.model_validate(values)


def signed(key: SigningKey, made: Receipt, subjects: dict[str, str] | None = None) -> bytes:
    """The envelope of a receipt about ``subjects``."""
    return key.sign(make_statement(made, SUBJECTS if subjects is None else subjects))


__all__ = [
    "B200", "DOCKER", "NOW", "OCI", "PORTABLE", "SUBJECTS", "checks", "gpus", "new_key", "policy", "receipt", "signed",
    "trusted",
]  # fmt: skip
