"""Downloads that break, stall, lie or begin elsewhere: the right bytes or an error, and nothing partial to be seen."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError, OciBuilderError, TransportError
from oci_builder.model.events import Event
from oci_builder.model.limits import Limits
from oci_builder.store.blobs import DirStore
from oci_builder.transports import registry_blobs
from oci_builder.transports.registry_blobs import fetch_blob
from oci_builder.transports.registry_pace import Pace
from tests.lab.images import small_image
from tests.lab.registry import Allowance, Registry, Reply, Request, drop_after, held_until, on, part, status, storage
from tests.lab.waits import until
from tests.transports.registry_case import Waits, client_of, held, partials, pull_from

REPO = "team/app"
DATA = bytes(range(256)) * 2000
DIGEST = Digest.of(DATA)
LAYER = Descriptor(media_type="application/octet-stream", digest=DIGEST, size=len(DATA))


def fetch(registry: Registry, root: Path, **options: object) -> None:
    with DirStore(root / "store") as store, client_of(registry, None, **options) as client:
        fetch_blob(client, LAYER, store)


def served(registry: Registry, *faults: object) -> Registry:
    registry.put_blob(DATA)
    registry.faults = list(faults)  # type: ignore[arg-type]
    return registry


def plant(root: Path, data: bytes) -> None:
    """A partial file as a dead process left it."""
    folder = DirStore(root / "store").root / "ingest"
    (folder / f"sha256-{DIGEST.hex}.part").write_bytes(data)


def fails(registry: Registry, root: Path, **options: object) -> OciBuilderError:
    with pytest.raises(OciBuilderError) as error:
        fetch(registry, root, **options)
    assert held(root) == set()
    return error.value


def test_c11_02_a_drop_is_resumed_where_it_broke(tmp_path: Path) -> None:
    with Registry() as registry:
        served(registry, on("GET", "blobs", drop_after(100_000), times=3))
        fetch(registry, tmp_path)
        ranges = [call.headers.get("range") for call in registry.calls("GET", "blobs")]
    assert held(tmp_path) == {DIGEST}
    assert ranges == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]


def test_c11_02_drops_without_progress_end(tmp_path: Path) -> None:
    waits = Waits()
    with Registry() as registry:
        served(registry, on("GET", "blobs", drop_after(0)))
        assert fails(registry, tmp_path, attempts=4, sleep=waits).code == "http.read"
    assert waits.seconds == [0.5, 1.0, 2.0]


def test_c11_02_drops_with_progress_go_on_past_the_number_of_tries(tmp_path: Path) -> None:
    with Registry() as registry:
        served(registry, on("GET", "blobs", drop_after(20_000)))
        fetch(registry, tmp_path, attempts=2)
        assert len(registry.calls("GET", "blobs")) == 26


@pytest.mark.parametrize("start", [1, 400_000, len(DATA) - 1, len(DATA)])
def test_a_later_process_resumes_with_the_prefix_hashed(tmp_path: Path, start: int) -> None:
    plant(tmp_path, DATA[:start])
    with Registry() as registry:
        fetch(served(registry), tmp_path)
        ranges = [call.headers.get("range") for call in registry.calls("GET", "blobs")]
    assert ranges == ([f"bytes={start}-"] if start < len(DATA) else [])
    assert held(tmp_path) == {DIGEST}


def test_b076_c11_04_a_200_is_never_appended(tmp_path: Path) -> None:
    plant(tmp_path, DATA[:1000])
    with Registry() as registry:
        fetch(served(registry, on("GET", "blobs", lambda _q, _r: Reply(200, DATA))), tmp_path)
    assert held(tmp_path) == {DIGEST}


@pytest.mark.parametrize("start", [900, 0])
def test_b077_a_206_that_begins_earlier_is_put_where_it_says(tmp_path: Path, start: int) -> None:
    plant(tmp_path, DATA[:1000])
    with Registry() as registry:
        fetch(served(registry, on("GET", "blobs", lambda _q, _r: part(DATA, start))), tmp_path)
        assert len(registry.calls("GET", "blobs")) == 1
    assert held(tmp_path) == {DIGEST}


def _range_says(text: str) -> object:
    def change(request: Request, reply: Reply) -> Reply | None:
        headers = {"Content-Range": text} if text else {}
        return Reply(206, DATA[1100:], headers) if "range" in request.headers else None

    return on("GET", "blobs", change)


@pytest.mark.parametrize("text", ["bytes 1100-511999/512000", "bytes 1000-511999/9", "", "bytes */512000", "1-2/3"])
def test_b077_a_206_that_fits_nowhere_begins_anew_without_ranges(tmp_path: Path, text: str) -> None:
    plant(tmp_path, DATA[:1000])
    with Registry() as registry:
        fetch(served(registry, _range_says(text)), tmp_path)
        assert "range" not in registry.calls("GET", "blobs")[-1].headers
    assert held(tmp_path) == {DIGEST}


def test_a_206_that_lies_about_its_start_is_found_by_the_digest(tmp_path: Path) -> None:
    plant(tmp_path, DATA[:1000])

    def lie(request: Request, _reply: Reply) -> Reply | None:
        if "range" in request.headers:
            return Reply(206, DATA[1001:] + b"x", {"Content-Range": f"bytes 1000-511999/{len(DATA)}"})
        return None

    with Registry() as registry:
        fetch(served(registry, on("GET", "blobs", lie)), tmp_path)
    assert held(tmp_path) == {DIGEST}


def test_a_416_begins_anew(tmp_path: Path) -> None:
    plant(tmp_path, DATA[:1000])

    def refuse(request: Request, _reply: Reply) -> Reply | None:
        return Reply(416) if "range" in request.headers else None

    with Registry() as registry:
        fetch(served(registry, on("GET", "blobs", refuse)), tmp_path)
    assert held(tmp_path) == {DIGEST}


@pytest.mark.parametrize("left", [b"another blob", bytes(len(DATA)), bytes(len(DATA) + 1)])
def test_b079_c11_05_a_partial_of_another_blob_is_thrown_away(tmp_path: Path, left: bytes) -> None:
    plant(tmp_path, left)
    notes: list[Event] = []
    with Registry() as registry, DirStore(tmp_path / "store") as store, client_of(served(registry), None) as client:
        fetch_blob(client, LAYER, store, notes.append)
    assert held(tmp_path) == {DIGEST}


def test_b061_a_truncated_blob_with_a_right_content_length(tmp_path: Path) -> None:
    with Registry() as registry:
        short = on("GET", "blobs", lambda _q, _r: Reply(200, DATA[:-1]))
        assert fails(served(registry, short), tmp_path).code == "blob.size"
    assert partials(tmp_path) == []


def test_c11_10_an_endless_body_is_cut_at_its_size(tmp_path: Path) -> None:
    with Registry() as registry:
        served(registry, on("GET", "blobs", lambda _q, r: replace(r, endless=True)))
        assert fails(registry, tmp_path).code == "blob.size"
    assert partials(tmp_path) == []


def test_c11_10_silence_ends(tmp_path: Path) -> None:
    limits, never = Limits(blob_idle_seconds=1), threading.Event()
    with Registry() as registry:
        served(registry, on("GET", "blobs", held_until(never)))
        assert fails(registry, tmp_path, limits=limits, attempts=1).code == "http.timeout"
        never.set()


def test_c11_10_a_drip_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever somebody asks for the time, a drop may come; the second comes after a minute."""
    seconds, drops = itertools.chain([0, 0], itertools.repeat(60)), threading.Semaphore(0)

    def clock() -> float:
        drops.release()
        return next(seconds)

    monkeypatch.setattr(registry_blobs, "Pace", lambda *given: Pace(*given, clock))
    with Registry() as registry:
        drip = on("GET", "blobs", lambda _q, r: replace(r, chunk=10, gate=lambda _size: drops.acquire(timeout=300)))
        error = fails(served(registry, drip), tmp_path, attempts=1)
        drops.release(len(DATA))
    assert (error.code, "drips" in error.message) == ("http.timeout", True)
    assert partials(tmp_path) == [f"sha256-{DIGEST.hex}.part"]


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "br", "nonsense"])
def test_c11_09_content_encoding_changes_nothing(tmp_path: Path, encoding: str) -> None:
    with Registry() as registry:
        label = on("GET", "blobs", lambda _q, r: replace(r, headers={**r.headers, "Content-Encoding": encoding}))
        fetch(served(registry, label), tmp_path / "only labelled")
        assert held(tmp_path / "only labelled") == {DIGEST}
        packed = on("GET", "blobs", lambda _q, _r: Reply(200, b"\x1f\x8bbad", {"Content-Encoding": encoding}))
        error = fails(served(registry, packed), tmp_path / "really packed")
    assert error.code == "blob.size"
    assert "Content-Encoding" in error.message


@pytest.mark.parametrize(("after", "waited"), [("7", 7.0), ("99999", 120.0), ("-5", 0.5), ("soon", 0.5)])
def test_429_waits_as_long_as_it_is_told_within_reason(tmp_path: Path, after: str, waited: float) -> None:
    waits = Waits()
    with Registry() as registry:
        served(registry, on("GET", "blobs", status(429, Retry_After=after), times=1))
        fetch(registry, tmp_path, sleep=waits)
    assert waits.seconds == [waited]


def test_429_with_a_date(tmp_path: Path) -> None:
    waits = Waits()
    with Registry() as registry:
        served(registry, on("GET", "blobs", status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"), times=1))
        fetch(registry, tmp_path, sleep=waits)
    assert waits.seconds == [0.0]


@pytest.mark.parametrize("code", [500, 502, 503, 504])
def test_5xx_is_tried_again_a_few_times(tmp_path: Path, code: int) -> None:
    with Registry() as registry:
        fetch(served(registry, on("GET", "blobs", status(code), times=2)), tmp_path / "a")
        error = fails(served(registry, on("GET", "blobs", status(code))), tmp_path / "b", attempts=3)
    assert error.fields["actual"] == code


def test_b074_an_expired_link_is_asked_for_again(tmp_path: Path) -> None:
    with Registry() as registry, storage(registry, once=True) as other:
        registry.put_blob(DATA)
        # The link dies while the body comes; the connection breaks, and the next link is a new one.
        other.faults.append(on("GET", "data", drop_after(200_000)))
        fetch(registry, tmp_path)
        links = {call.query["X-Amz-Signature"] for call in other.calls("GET", "data")}
        assert len(links) == len(registry.calls("GET", "blobs")) > 1
    assert held(tmp_path) == {DIGEST}


def test_b074_a_link_that_is_dead_on_arrival_is_asked_for_again(tmp_path: Path) -> None:
    with Registry() as registry, storage(registry) as other:
        registry.put_blob(DATA)
        other.faults.append(on("GET", "data", status(403), times=2))
        fetch(registry, tmp_path)
        assert len(registry.calls("GET", "blobs")) == 3
    assert held(tmp_path) == {DIGEST}


def test_c2_14_a_corrupt_blob_in_the_store_is_fetched_anew(tmp_path: Path) -> None:
    with Registry() as registry:
        fetch(served(registry), tmp_path)
        DirStore(tmp_path / "store").path(DIGEST).write_bytes(bytes(len(DATA)))
        fetch(registry, tmp_path)
        assert len(registry.calls("GET", "blobs")) == 2
    with DirStore(tmp_path / "store") as store:
        assert store.open(DIGEST).pread(len(DATA), 0) == DATA


def test_c11_12_two_processes_pull_the_same_blob_once(tmp_path: Path) -> None:
    with Registry() as registry:
        served(registry, on("GET", "blobs", lambda _q, r: replace(r, chunk=50_000)))
        both = [_process(registry, tmp_path) for _ in range(2)]
        assert [p.wait(300) for p in both] == [0, 0]
        assert len(registry.calls("GET", "blobs")) == 1
    assert held(tmp_path) == {DIGEST}


def test_kill_9_at_many_moments_and_the_next_run_goes_on(tmp_path: Path) -> None:
    ingest = DirStore(tmp_path / "store").root / "ingest"
    with Registry() as registry:
        for size in (50_000, 100_000, 100_000, 100_000):
            allowance, before = Allowance(size), sum(part.stat().st_size for part in ingest.glob("*.part"))
            served(registry, on("GET", "blobs", lambda _q, r, gate=allowance: replace(r, chunk=20_000, gate=gate)))
            process = _process(registry, tmp_path)
            until(lambda before=before: sum(part.stat().st_size for part in ingest.glob("*.part")) > before)  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
            process.wait()
            allowance.ended.set()
            assert held(tmp_path) == set()
        registry.faults = []
        fetch(registry, tmp_path)
        starts = [call.headers.get("range") for call in registry.calls("GET", "blobs")]
    assert held(tmp_path) == {DIGEST}
    assert None not in starts[1:]
    assert partials(tmp_path) == []


def _process(registry: Registry, root: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from tests.lab.registry import Registry\n"
        "from tests.transports.registry_case import client_of\n"
        "from oci_builder.store.blobs import DirStore; from oci_builder.transports.registry_blobs import fetch_blob\n"
        "from oci_builder.model.documents import Descriptor\n"
        "class R: host = sys.argv[1]\n"
        "d = Descriptor(media_type='application/octet-stream', digest=sys.argv[3], size=int(sys.argv[4]))\n"
        "fetch_blob(client_of(R, None), d, DirStore(Path(sys.argv[2]) / 'store'))\n"
    )
    arguments = [registry.host, str(root), DIGEST, str(len(DATA))]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_one_failed_layer_ends_the_others_soon(tmp_path: Path) -> None:
    """The others stand still in mid-body until all is over; nobody waits for them or asks for them again."""
    image, some = small_image(4, size=100_000), Allowance(10_000)
    bad = Digest.of(image.layers[2])

    def change(request: Request, reply: Reply) -> Reply:
        if request.path.endswith(bad):
            return Reply(200, bytes(len(reply.body)), reply.headers)
        return replace(reply, chunk=1000, gate=some) if len(reply.body) > 50_000 else reply

    with Registry() as registry:
        digest = image.publish(registry, REPO)
        registry.faults = [on("GET", "blobs", change)]
        with pytest.raises(IntegrityError) as error:
            pull_from(registry, digest, tmp_path)
        some.ended.set()
        paths = [call.path for call in registry.calls("GET", "blobs")]
    assert error.value.code == "blob.digest"
    assert len(paths) == len(set(paths))


def test_layers_come_in_parallel_and_no_more_than_four(tmp_path: Path) -> None:
    image = small_image(8, size=5000)
    running, most, lock, four = [0], [0], threading.Lock(), threading.Event()

    def change(_request: Request, reply: Reply) -> Reply | None:
        if len(reply.body) < 3000:
            return None
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 4:
                four.set()
        four.wait(300)
        time.sleep(0.1)  # for a fifth, which must not come
        with lock:
            running[0] -= 1
        return None

    with Registry() as registry:
        digest = image.publish(registry, REPO)
        registry.faults = [on("GET", "blobs", change)]
        pull_from(registry, digest, tmp_path)
    assert most[0] == 4


def test_a_refused_connection_is_an_error_with_the_host(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
        nobody = types.SimpleNamespace(host=f"127.0.0.1:{held.getsockname()[1]}")
        error = fails(nobody, tmp_path, attempts=2)  # type: ignore[arg-type]
    assert (error.code, type(error)) == ("http.connect", TransportError)
    assert error.message.startswith(f"{nobody.host}: "), "with its port: one machine may have several"
