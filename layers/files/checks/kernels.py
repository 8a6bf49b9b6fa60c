"""One call of each compiled operator, forward and backward where it has one, beside the same arithmetic in float32."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from .conditions import cache_files


def against(function: Callable[..., Any], reference: Callable[..., Any], leaves: Sequence[Any]) -> dict[str, float]:
    """Relative errors of the output and of each leaf's gradient; the reference runs on the CPU in float32.

    Args:
        function: the operator on tensors of the GPU.
        reference: the same in torch's plain operations.
        leaves: inputs; those that require a gradient are differentiated.
    """
    import torch

    copies = [x.detach().cpu().float().requires_grad_(x.requires_grad) for x in leaves]
    out, right = function(*leaves), reference(*copies)
    errors = {"output": distance(out, right)}
    if right.requires_grad:
        weight = torch.randn(right.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
        if out.requires_grad:  # else every gradient is missing, which is seen below
            out.backward(weight.to(out.device))
        right.backward(weight.float())
        pairs = [(a.grad, b.grad) for a, b in zip(leaves, copies, strict=True) if b.requires_grad]
        errors.update({f"gradient {n}": distance(a, b) for n, (a, b) in enumerate(pairs)})
    return errors


def distance(value: Any, right: Any) -> float:
    """Norm of the difference over the norm of the reference; infinite where there is no value."""
    if value is None or right is None or value.shape != right.shape:
        return float("inf")
    difference = value.detach().cpu().double() - right.detach().double()
    return float(difference.norm() / right.detach().double().norm())


def leaf(*shape: int, scale: float = 1.0, dtype: Any = None, gradient: bool = True) -> Any:
    """Random numbers on the GPU, bf16 unless said otherwise; fresh ones each time."""
    import torch

    values = (torch.randn(*shape) * scale).to("cuda", dtype or torch.bfloat16)
    return values.requires_grad_(gradient)


def transformer_engine() -> dict[str, Any]:
    """A linear layer; the cuDNN that the package found."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.utils import get_cudnn_version

    layer = te.Linear(256, 512, bias=True, params_dtype=torch.bfloat16, device="cuda")
    leaves = [leaf(64, 256), layer.weight, layer.bias]
    errors = against(lambda x, w, b: layer(x), torch.nn.functional.linear, leaves)
    return {"errors": errors, "cudnn": ".".join(map(str, get_cudnn_version()))}


def causal_conv1d() -> dict[str, Any]:
    """A depthwise convolution that looks back only, with SiLU."""
    import causal_conv1d as package
    from torch.nn.functional import conv1d, pad, silu

    def plain(x: Any, w: Any, b: Any) -> Any:
        return silu(conv1d(pad(x, (w.shape[1] - 1, 0)), w[:, None], b, groups=w.shape[0]))

    leaves = [leaf(2, 64, 256), leaf(64, 4), leaf(64)]
    errors = against(lambda x, w, b: package.causal_conv1d_fn(x, w, b, activation="silu"), plain, leaves)
    return {"errors": errors, "version": getattr(package, "__version__", "")}


def mamba_ssm() -> dict[str, Any]:
    """A selective scan, against its recurrence step by step."""
    import mamba_ssm as package
    import torch
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    a = -torch.rand(64, 16, device="cuda") - 0.1
    leaves = [leaf(2, 64, 128), leaf(2, 64, 128, scale=0.5), a.requires_grad_(), leaf(2, 16, 128), leaf(2, 16, 128),
              leaf(64, dtype=torch.float32)]  # fmt: skip

    def operator(u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return selective_scan_fn(u, delta, a, b, c, d, delta_softplus=True)

    return {"errors": against(operator, scan, leaves), "version": getattr(package, "__version__", "")}


def scan(u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """h' = exp(softplus(delta) a) h + softplus(delta) b u; y = c h' + d u.

    Source: Mamba, arXiv 2312.00752, section 3.
    """
    import torch

    step = torch.nn.functional.softplus(delta)
    state = u.new_zeros(u.shape[0], u.shape[1], a.shape[1])
    out = []
    for t in range(u.shape[2]):
        now = step[:, :, t, None]
        state = torch.exp(now * a) * state + now * b[:, None, :, t] * u[:, :, t, None]
        out.append((state * c[:, None, :, t]).sum(-1) + d * u[:, :, t])
    return torch.stack(out, -1)


def grouped_gemm() -> dict[str, Any]:
    """Products of unequal groups, one of them empty."""
    import grouped_gemm as package
    import torch
    from grouped_gemm import ops

    sizes = [64, 0, 192, 128]
    counts = torch.tensor(sizes)

    def plain(x: Any, w: Any) -> Any:
        return torch.cat([part @ w[n] for n, part in enumerate(x.split(sizes))])

    errors = against(lambda x, w: ops.gmm(x, w, counts), plain, [leaf(sum(sizes), 128), leaf(len(sizes), 128, 256)])
    return {"errors": errors, "version": getattr(package, "__version__", "")}


def flash_attn() -> dict[str, Any]:
    """Causal attention."""
    import flash_attn as package
    from torch.nn.functional import scaled_dot_product_attention

    def plain(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    leaves = [leaf(2, 128, 4, 64) for _ in range(3)]
    errors = against(lambda q, k, v: package.flash_attn_func(q, k, v, causal=True), plain, leaves)
    return {"errors": errors, "version": package.__version__}


def flashinfer() -> dict[str, Any]:
    """Causal attention over a prompt and over one new token, with fewer heads for keys than for queries."""
    import flashinfer as package

    def prompt(q: Any, k: Any, v: Any) -> Any:
        return package.single_prefill_with_kv_cache(q, k, v, causal=True, backend="fa2")

    queries, keys, values, one = (leaf(*shape, 128, gradient=False) for shape in ((96, 4), (96, 2), (96, 2), (4,)))
    whole = against(prompt, lambda q, k, v: attention(q, k, v, causal=True), [queries, keys, values])
    decode = package.single_decode_with_kv_cache
    token = against(decode, lambda q, k, v: attention(q[None], k, v)[0], [one, keys, values])
    made = [name for name in cache_files("FLASHINFER_WORKSPACE_BASE") if name.endswith(".so")]
    errors = {"prompt": whole["output"], "token": token["output"]}
    return {"errors": errors, "version": package.__version__, "compiled": len(made)}


def attention(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Softmax attention of tensors (tokens, heads, width), where several heads of queries may share one of keys."""
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class NotForThisPython(Exception):
    """What cannot be tried with this interpreter; the text says why."""


def vllm_deep_gemm() -> dict[str, Any]:
    """vLLM's own copy of DeepGEMM. Its wheel has the extension for one Python only; elsewhere vLLM does without.

    Raises:
        NotForThisPython: there is no extension for this one.
    """
    import vllm

    folder = Path(vllm.__file__).parent / "third_party/deep_gemm"
    if not any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        there = ", ".join(sorted(p.name for p in folder.glob("_C*.so"))) or "no extension"
        raise NotForThisPython(f"vLLM's own DeepGEMM has {there}, which this Python does not load")
    return deep_gemm("vllm.third_party.deep_gemm")


def deep_gemm(module: str) -> dict[str, Any]:
    """A bf16 product, compiled on this machine: its cache was empty and holds the kernel afterwards."""
    import torch

    package = importlib.import_module(module)

    def operator(a: Any, b: Any) -> Any:
        out = torch.empty(a.shape[0], b.shape[0], device=a.device, dtype=torch.bfloat16)
        package.bf16_gemm_nt(a, b, out)
        return out

    leaves = [leaf(256, 512, gradient=False), leaf(384, 512, gradient=False)]
    errors = against(operator, lambda a, b: a @ b.T, leaves)
    made = [name for name in cache_files("DG_JIT_CACHE_DIR") if name.endswith(".cubin")]
    problems = [] if made else ["the kernel was not compiled here: its cache has no cubin"]
    return {"errors": errors, "problems": problems, "version": package.__version__, "cubins": len(made)}
