"""Stages that make a release, on Modal:

    modal run modal_build.py --stage build|package|container|container-check|qualification|publish [OPTIONS]

OPTIONS are those of ``oci-builder stage``; docs/modal.md says what runs where and how a release is made.
"""

from oci_builder.cli.scripts import run_script, script_app

STAGES = ("build", "package", "container", "container-check", "qualification", "publish")
app = script_app(__file__, "oci-builder-build", *STAGES)


@app.local_entrypoint()
def main(*words: str) -> bytes:
    """The stage that the words choose; its answer as JSON."""
    return run_script(__file__, words, *STAGES)
