"""The hostile catalogue as data: every case of the tables beside this file, in one form.

A case is what must happen to one input wherever it comes in. ``code`` is the refusal's code; None means that it is
accepted, and ``tree`` (where a case tells it) what must then stand in the folder. ``docs/hostile-cases.md`` tells the
rows that cases belong to; ``rows`` holds the two together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.hostile import cases_archive, cases_compress, cases_documents, cases_tar, cases_variants
from tests.hostile.shapes import Build, Shapes, lab_shapes, layer_shapes, lone
from tests.lab.archives import Lab, Members

Tree = dict[bytes, object]


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        id: of its row, with a letter where a row has several inputs.
        title: what it is.
        code: of the refusal, or None.
        shapes: the forms in which it comes.
        tree: what is unpacked, where that is told.
        lab: the image, where it can be served by a registry.
    """

    id: str
    title: str
    code: str | None
    shapes: Shapes
    tree: Tree | None = None
    lab: Lab | None = None

    @property
    def row(self) -> str:
        """The row of the catalogue."""
        found = re.match(r"C\d+-\d+", self.id)
        return found[0] if found else self.id

    def members(self) -> Members:
        """As an OCI layout's files, for a registry."""
        assert self.lab is not None
        return self.lab.oci()


def of_tar(case_id: str, title: str, layers: list[bytes], outcome: cases_tar.Outcome) -> Case:
    """A case of layers."""
    code, tree = (outcome, None) if isinstance(outcome, str) else (None, outcome)
    return Case(case_id, title, code, layer_shapes(layers), tree, Lab(layers=layers))


def of_lab(case_id: str, title: str, lab: Lab, code: str | None) -> Case:
    """A case of documents or blobs."""
    return Case(case_id, title, code, lab_shapes(lab), None, lab)


def of_archive(case_id: str, title: str, build: Build, code: str | None) -> Case:
    """A case of an outer archive."""
    return Case(case_id, title, code, lone(build))


TARS = [of_tar(*case) for case in (*cases_tar.CASES, *cases_variants.TARS)]
LABS = [of_lab(*case) for case in (*cases_documents.CASES, *cases_compress.CASES, *cases_variants.LABS)]
ARCHIVES = [of_archive(*case) for case in (*cases_archive.CASES, *cases_variants.ARCHIVES)]
CASES: list[Case] = [*TARS, *LABS, *ARCHIVES]
