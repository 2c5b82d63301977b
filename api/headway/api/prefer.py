"""The `Prefer` header of RFC 7240. Pure."""

from collections.abc import Iterable

#: The longest wait that a caller gets, in seconds; common proxies cut silent connections not much later.
MAX_WAIT_S = 300


def preferences(headers: Iterable[str]) -> dict[str, str]:
    """Name and value of each preference, over all `Prefer` headers; of a repeated one only the first counts."""
    found: dict[str, str] = {}
    for preference in ",".join(headers).split(","):
        # What stands behind a semicolon are parameters, and neither of the preferences that are known here has any.
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip():
            found.setdefault(name.strip().lower(), value.strip().strip('"'))
    return found


def wait_s(wanted: dict[str, str]) -> int:
    """Seconds that the caller wants to wait, at most `MAX_WAIT_S`; a value that is no number is no wish."""
    value = wanted.get("wait", "")
    return min(int(value), MAX_WAIT_S) if value.isascii() and value.isdecimal() and len(value) < 10 else 0
