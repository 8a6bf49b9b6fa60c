"""torch sees every GPU of the sandbox, multiplies bf16 matrices right, and its gradients agree with the CPU's."""

from __future__ import annotations

import errno
import json
import os
import socket

import torch

BOUND = 2e-2


def network_is_blocked() -> bool:
    """Whether a packet has nowhere to go."""
    with socket.socket() as sock:
        sock.settimeout(2)
        return sock.connect_ex(("192.0.2.1", 80)) == errno.ENETUNREACH


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest wanted value."""
    return float((actual.double().cpu() - wanted).abs().max() / wanted.abs().max())


def matmul_error(device: str) -> float:
    """bf16 on the GPU against float64 on the CPU, from the same bf16 inputs."""
    a, b = (torch.randn(1024, 1024, dtype=torch.bfloat16) for _ in range(2))
    return relative_error(a.to(device) @ b.to(device), a.double() @ b.double())


def gradient_error(device: str) -> float:
    """One backward step of a small network, GPU bf16 against CPU float64."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).to(torch.bfloat16)
    data = torch.randn(128, 256, dtype=torch.bfloat16)
    wanted = [p.double().detach().requires_grad_() for p in model.parameters()]
    reference = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).double()
    with torch.no_grad():
        for own, given in zip(reference.parameters(), wanted, strict=True):
            own.copy_(given)
    reference(data.double()).square().mean().backward()
    on_gpu = model.to(device)
    on_gpu(data.to(device)).float().square().mean().backward()
    pairs = zip(on_gpu.parameters(), reference.parameters(), strict=True)
    return max(relative_error(g.grad, r.grad) for g, r in pairs)


def main() -> None:
    """Print one result."""
    torch.manual_seed(7)
    count = torch.cuda.device_count()
    gpus = [
        {"name": p.name, "uuid": f"GPU-{p.uuid}", "capability": f"{p.major}.{p.minor}", "memory": p.total_memory}
        for p in map(torch.cuda.get_device_properties, range(count))
    ]
    errors = {f"cuda:{i}": [matmul_error(f"cuda:{i}"), gradient_error(f"cuda:{i}")] for i in range(count)}
    blocked = network_is_blocked()
    wanted = int(os.environ.get("EXPECT_GPUS", "1"))
    reasons = [f"{d}: relative errors {e} over {BOUND}" for d, e in errors.items() if not max(e) < BOUND]
    reasons += [] if blocked else ["the network is not blocked"]
    reasons += [] if count == wanted else [f"{count} GPUs, expected {wanted}"]
    details = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "errors": errors}
    print(json.dumps({"outcome": "fail" if reasons else "pass", "reason": "; ".join(reasons), "details": details}))


if __name__ == "__main__":
    main()
