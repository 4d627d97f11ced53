"""The secret that the launchers of a run on several machines share: where it is, and how two of them prove to each
other that they know it without saying it. Knows no torch and no sockets.

Both sides of a connection choose a nonce, so that a proof which was overheard is none on another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from manyhands.core.errors import UserError

SECRET, SECRET_FILE = "MANYHANDS_SECRET", "MANYHANDS_SECRET_FILE"  # a text; a path
SHARED_FILE = ".manyhands-secret"  # in output.dir, which all nodes share
SEEN_S = 10.0  # until what another machine has written is seen on this one
_NUM_BYTES = 32


def read_secret(output: Path, environ: Mapping[str, str] = os.environ) -> bytes:
    """What ``MANYHANDS_SECRET`` is, or the file that ``MANYHANDS_SECRET_FILE`` names; else a random one in the folder
    ``output``, made by the first node that looks for it and readable by its owner alone. UserError where it cannot be
    had.
    """
    if text := environ.get(SECRET, "").strip():
        return text.encode()
    path = Path(environ[SECRET_FILE]) if environ.get(SECRET_FILE) else None
    try:
        text = (path.read_text(encoding="utf-8") if path is not None else _read_shared(output / SHARED_FILE)).strip()
    except (OSError, ValueError) as error:
        raise UserError(
            "the secret that the nodes share cannot be read",
            where=f"environment: {SECRET_FILE}={path}" if path is not None else str(output / SHARED_FILE),
            why=getattr(error, "strerror", None) or str(error),
            fix=f"correct that file, or set the same {SECRET} on every machine",
        ) from error
    if not text:
        raise UserError(
            "the file of the secret that the nodes share is empty",
            where=str(path or output / SHARED_FILE),
            fix=f"remove it, or set the same {SECRET} on every machine",
        )
    return text.encode()


def _read_shared(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # NFS may show a file of another machine late, or empty at first
        deadline = time.monotonic() + SEEN_S
        while not (text := path.read_text(encoding="ascii")).endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.1)
        return text
    with open(descriptor, "w", encoding="ascii") as file:
        text = secrets.token_hex(_NUM_BYTES) + "\n"
        file.write(text)
    return text


def new_nonce() -> str:
    return secrets.token_hex(_NUM_BYTES)


def prove(secret: bytes, *said: str) -> str:
    """What only who knows the secret can say of these texts: HMAC-SHA-256 (RFC 2104)."""
    return hmac.new(secret, "\n".join(said).encode(), hashlib.sha256).hexdigest()


def is_proof(proof: object, secret: bytes, *said: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), prove(secret, *said).encode())
