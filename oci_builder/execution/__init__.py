"""Programs in an unpacked image: staging its tree, running in it, and the gates of ``verify --exec``."""
