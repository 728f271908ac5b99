"""Files of models of one's own."""

from steplab.workloads.user_model import load_user_model


def named(word: str) -> str:
    """Name `path/to/file.py:factory` as a user does, so that a spec may hold the name."""
    return load_user_model(word).name
