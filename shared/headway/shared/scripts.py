"""The Lua scripts, each a file in `lua/`; a script's name on the server is its content, so versions coexist."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and the SHA-1 by which the server knows it."""

    text: bytes
    sha: str


@cache
def script(name: str) -> Script:
    """The script `lua/<name>.lua`, with the prelude in front."""
    folder = resources.files("headway.shared") / "lua"
    text = (folder / "prelude.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest())
