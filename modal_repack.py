"""Repair packaging files of a candidate, on Modal, from the image of its build:

    NRL_REPACK_IMAGE_ID=im-… modal run modal_repack.py [OPTIONS]

OPTIONS are those of ``oci-builder stage``; docs/modal.md says what runs where and how a release is made.
"""

from oci_builder.cli.scripts import run_script, script_app

app = script_app("oci-builder-repack")


@app.local_entrypoint()
def main(*words: str) -> None:
    """The stage that the words choose."""
    run_script(words, "repack")
