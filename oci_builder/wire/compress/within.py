"""What one stream may cost, and the parallel way that its decoders share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from oci_builder.model.errors import PolicyError
from oci_builder.model.limits import Limits
from oci_builder.wire.compress.pull import Pull

Warn = Callable[[str, str], None]
OnMember = Callable[["MemberSeen"], None]

# The most uncompressed bytes that are decoded in one go, and the most compressed bytes held for that.
UNIT = 4 << 20
PACKED_UNIT = UNIT + (64 << 10)


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A gzip member or zstd frame that was read to its end.

    Attributes:
        offset: where it starts in the compressed stream.
        data_offset: where its data starts in the uncompressed stream.
        ours: a gzip member whose header is, length field included, just as we write it.
        stored: and its data is stored, so that it has no bit that could be otherwise.
    """

    offset: int
    data_offset: int
    ours: bool
    stored: bool = False


class Budget:
    """Counts uncompressed bytes against the limits of one layer (or of a whole image), and reports members as they end.

    ``bound`` is the field of the limits that bounds the output, ``layer_size`` or ``image_size``.
    """

    __slots__ = ("bound", "limits", "most", "on_member", "spent", "where")

    def __init__(
        self, limits: Limits, where: str, on_member: OnMember | None = None, bound: str = "layer_size"
    ) -> None:
        self.limits = limits
        self.where = where
        self.bound = bound
        self.most: int = getattr(limits, bound)
        self.spent = 0
        self.on_member = on_member

    def seen(self, offset: int, data_offset: int, ours: bool, stored: bool) -> None:
        """Report a member."""
        if self.on_member:
            self.on_member(MemberSeen(offset, data_offset, ours, stored))

    def spend(self, size: int) -> None:
        """Count ``size`` bytes of output.

        Raises:
            PolicyError: ``limit.layer``, or ``limit.image``.
        """
        self.spent += size
        if self.spent > self.most:
            what = self.bound.partition("_")[0]
            raise PolicyError(
                f"limit.{what}",
                f"{self.where}: more than {self.most} bytes uncompressed; raise limits.{self.bound} if"
                f" this {what} is really meant to be so large",
                where=self.where, expected=f"<= {self.most}", actual=self.spent,
            )  # fmt: skip

    def check_ratio(self, packed: int) -> None:
        """Compare the output so far with the ``packed`` bytes that it came from.

        Called at the end of each member, and inside a member only past ``UNIT``: so the parallel way, which sees
        whole members up to that size, checks the same numbers as the serial one.

        Raises:
            PolicyError: ``limit.ratio``.
        """
        limits = self.limits
        if self.spent > limits.ratio_floor and self.spent > limits.ratio * packed:
            raise PolicyError(
                "limit.ratio",
                f"{self.where}: {packed} compressed bytes gave {self.spent}, over {limits.ratio} times as many: a"
                " decompression bomb, or raise limits.ratio",
                where=self.where, expected=f"<= {limits.ratio}", actual=self.spent // max(1, packed),
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Units:
    """What the pool must know of a format.

    Attributes:
        next_size: bytes of the unit that starts here, 0 when there is none that the pool can take.
        decode: a unit's data, at most ``UNIT`` bytes; None when anything at all is wrong with it.
        form: whether a good unit's header is exactly as we write it, and whether its data is stored.
    """

    next_size: Callable[[Pull, Budget], int]
    decode: Callable[[memoryview], bytes | None]
    form: Callable[[memoryview], tuple[bool, bool]]


def decode_units(pull: Pull, budget: Budget, threads: int, units: Units) -> Generator[bytes, None, None]:
    """Decode members or frames in a pool, in order, until the first that is not exactly as it says.

    The stream then stands at the first unit that was not delivered; the careful way goes on from there, so what comes
    out is what the careful way alone would give. Memory: at most ``threads + 2`` units.
    """
    jobs: deque[tuple[memoryview, Future[bytes | None]]] = deque()
    pool = ThreadPoolExecutor(threads, "decode")
    try:
        while (size := units.next_size(pull, budget)) or jobs:
            if size:
                packed = pull.take(size)
                jobs.append((packed, pool.submit(units.decode, packed)))
                if len(jobs) < threads + 2:
                    continue
            data = jobs[0][1].result()
            if data is None:
                return
            start, data_start = pull.offset - sum(len(job[0]) for job in jobs), budget.spent
            budget.spend(len(data))
            packed = jobs.popleft()[0]
            if data:
                yield data
            budget.check_ratio(start + len(packed))
            budget.seen(start, data_start, *units.form(packed))
    finally:
        # No waiting: a generator that was left behind is finished by the garbage collector, which may run in any
        # thread at any point, even inside a thread that is just starting; to join there is to wait for ever.
        pool.shutdown(wait=False, cancel_futures=True)
        for packed, _ in reversed(jobs):
            pull.push_back(packed)
