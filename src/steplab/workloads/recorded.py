"""Which workload a record was made with: a built-in by its name, a user's own by the user's word.

Records hold the name of a user's own model and the hash of its file, and no code.
"""

from __future__ import annotations

from steplab.core.errors import UserError
from steplab.core.input_file import shorten
from steplab.workloads.workload import WorkloadEntry, find_workload, is_user_model


def workload_of_record(name: str, where: object, own: WorkloadEntry | None) -> WorkloadEntry:
    """Return the workload that a record was made with; a user's own is `own`, named by the user."""
    if not is_user_model(name):
        if own is not None:
            raise UserError(
                f"{where} is a model of the built-in {shorten(name)}, not of {own.name}.",
                f"Leave {own.name} out: the record knows what it is.",
            )
        return find_workload(name)
    if own is None:
        raise not_named(where, name)
    return own


def not_named(where: object, name: str) -> UserError:
    """Return the error for a record of a user's own model whose file the user has not named."""
    return UserError(
        f"{where} was made with {shorten(name)}, a model of one's own: a record holds its name, "
        "not its code.",
        "Name the file: --model my_model.py:make.",
    )


def is_same_code(own: WorkloadEntry, name: str, source: str) -> bool:
    """Whether a record was made by the same factory of a file with the same content."""
    return own.source == source and own.name.rpartition(":")[2] == name.rpartition(":")[2]


def note_on_code(own: WorkloadEntry, name: str, source: str, where: object) -> str:
    """Say that a record was made with other code than `own`; "" when not, or when nobody knows."""
    if not source or not own.source or is_same_code(own, name, source):
        return ""
    return (
        f"the code has changed: {where} was made with {shorten(name)} (hash {shorten(source)}), "
        f"now it is {own.name} (hash {own.source})"
    )
