"""Repair packaging files of a candidate, on Modal, from the image of its build:

    NRL_REPACK_IMAGE_ID=im-… modal run modal_repack.py [OPTIONS]

OPTIONS are those of ``oci-builder stage``; docs/modal.md says what runs where and how a release is made.
"""

from oci_builder.cli.scripts import run_script, script_app

STAGES = ("repack",)
app = script_app(__file__, "oci-builder-repack", *STAGES)


@app.local_entrypoint()
def main(*words: str) -> bytes:
    """The stage that the words choose; its answer as JSON."""
    return run_script(__file__, words, *STAGES)
