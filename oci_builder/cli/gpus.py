"""``--gpu`` with or without devices, before whatever word comes next."""

from __future__ import annotations

import re

import click

# 0:1 is CDI's name of the second part (MIG) of the first GPU.
_DEVICE = r"(all|\d+(:\d+)?|(GPU|MIG)-[^,]+)"
_DEVICES = re.compile(rf"{_DEVICE}(,{_DEVICE})*\Z")


class GpuCommand(click.Command):
    """A command whose ``--gpu`` takes the next word only when that names GPUs: ``verify --exec --gpu ARCHIVE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell a ``--gpu`` without devices out, then parse as ever."""
        return super().parse_args(ctx, self._spelled_out(ctx, args))

    def _spelled_out(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            name for option in self.params if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts if name != "--gpu"
        }  # fmt: skip
        out: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            if word == "--" or not (word.startswith("-") or ctx.allow_interspersed_args):
                return [*out, word, *rest]
            bare = word == "--gpu" and not (rest and _DEVICES.match(rest[0]))
            out.append("--gpu=all" if bare else word)
            if rest and (word in valued or (word == "--gpu" and not bare)):
                out.append(rest.pop(0))
        return out


GPU = click.option(
    "--gpu", is_flag=False, flag_value="all", default=None, metavar="[DEVICES]",
    help="Give it GPUs: all (or CUDA_VISIBLE_DEVICES), or indices and UUIDs with commas.",
)  # fmt: skip
