"""One process that forks runs, and one registry, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.faults.work")

from tests.conftest import Built  # noqa: E402
from tests.faults.lab import Zygote, shim  # noqa: E402
from tests.faults.work import Bench  # noqa: E402
from tests.lab.registry import Registry  # noqa: E402


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, quick: Built) -> Iterator[Bench]:
    with Registry() as registry:
        yield Bench(tmp_path_factory.mktemp("bench"), quick, registry)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote")) as one:
        yield one


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """As ``zygote``, with the library that makes calls fail."""
    folder = tmp_path_factory.mktemp("faulty")
    library = shim(folder)
    if library is None:
        pytest.skip("no C compiler for the library that makes calls fail")
    with Zygote(folder, library) as one:
        yield one
