"""The checks on B200s, on Modal:

    modal run modal_qualify.py --stage single|nccl8|nccl8-u24 [OPTIONS]

OPTIONS are those of ``oci-builder stage``; docs/modal.md says what runs where and how a release is made.
"""

from oci_builder.cli.scripts import run_script, script_app

app = script_app("oci-builder-qualify")


@app.local_entrypoint()
def main(*words: str) -> None:
    """The stage that the words choose."""
    run_script(words, "single", "nccl8", "nccl8-u24")
