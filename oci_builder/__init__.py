"""oci-builder: reproducible OCI images and portable archives of big Python/CUDA runtimes, built without a daemon."""

__version__ = "0.1.0"
