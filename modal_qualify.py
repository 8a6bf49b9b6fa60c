"""The checks on B200s, on Modal:

    modal run modal_qualify.py --stage single|nccl8|nccl8-u24 [OPTIONS]

OPTIONS are those of ``oci-builder stage``; docs/modal.md says what runs where and how a release is made.
"""

from oci_builder.cli.scripts import run_script, script_app

STAGES = ("single", "nccl8", "nccl8-u24")
app = script_app(__file__, "oci-builder-qualify", *STAGES)


@app.local_entrypoint()
def main(*words: str) -> bytes:
    """The stage that the words choose; its answer as JSON."""
    return run_script(__file__, words, *STAGES)
