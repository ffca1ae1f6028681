"""Keys of KV blocks: SHA-256 chained over full blocks, salted by tenant, equal between processes and after restarts.

It does not know where blocks lie. A field is tagged or length-prefixed, so that none can stand for another.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

ROOT, BLOCK = b"antiphon/kv/root/1", b"antiphon/kv/block/1"  # domain tags; the number changes with the layout
SECRET_BYTES = 32


def salt(secret: bytes, tenant: str) -> bytes:
    """A tenant's salt: HMAC-SHA256 of its name with the deployment's secret."""
    return hmac.digest(secret, tenant.encode(), "sha256")


def root(model: str, adapter: str, tenant_salt: bytes) -> bytes:
    """Key before a sequence's first block: who computes and for whom. ``model``, ``adapter``: digests, or empty."""
    made = hashlib.sha256(ROOT)
    for value in (model.encode(), adapter.encode(), tenant_salt):
        made.update(len(value).to_bytes(8, "little") + value)
    return made.digest()


def chain(parent: bytes, ids: bytes, block_bytes: int) -> list[bytes]:
    """Keys of the full blocks of packed ids, each with its parent's key in it. The length says the block's size too."""
    digest, keys = hashlib.sha256, []
    length = block_bytes.to_bytes(8, "little")
    for begin in range(0, len(ids) - block_bytes + 1, block_bytes):
        parent = digest(BLOCK + parent + length + ids[begin:begin + block_bytes]).digest()
        keys.append(parent)
    return keys


def secret_at(path: str = "") -> bytes:
    """The deployment's secret, made at the first use: 32 random bytes in a file that only its owner reads.

    Empty ``path``: below ``ANTIPHON_HOME``, else ``~/.cache/antiphon``. Raises ValueError: what is there is no secret.
    """
    home = Path(os.environ.get("ANTIPHON_HOME") or "~/.cache/antiphon").expanduser().absolute()
    file = Path(path).expanduser().absolute() if path else home / "secret"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secrets.token_bytes(SECRET_BYTES))
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, file)  # whole or not at all; who comes second reads what the first one made
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    if (mode := file.stat().st_mode & 0o777) & 0o077:
        raise ValueError(f"the secret {file} can be read by others (mode {mode:o}): chmod 600 {file}")
    secret = file.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret {file} has {len(secret)} bytes, not {SECRET_BYTES}: remove it, and blocks stored "
                         "under it are not found again")
    return secret
