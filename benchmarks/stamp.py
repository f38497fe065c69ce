"""Store the digest of a picture's data in a text chunk of the PNG, so that a stale picture is noticed."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

KEYWORD = b"Digest"
PNG_HEAD = b"\x89PNG\r\n\x1a\n"


def stamp(path: Path, digest: str) -> None:
    """Write ``digest`` into a picture that has none yet."""
    path.write_bytes(with_text(path.read_bytes(), KEYWORD, digest.encode()))


def stamp_of(path: Path) -> str | None:
    """Return the digest in a picture; ``None``: it has none, or is not a complete PNG."""
    png = path.read_bytes()
    start = len(PNG_HEAD)
    while png.startswith(PNG_HEAD) and start + 12 <= len(png):
        (length,) = struct.unpack(">I", png[start : start + 4])
        kind, body = png[start + 4 : start + 8], png[start + 8 : start + 8 + length]
        if kind == b"tEXt" and body.startswith(KEYWORD + b"\0"):
            return body[len(KEYWORD) + 1 :].decode("latin-1")
        start += 12 + length
    return None


def with_text(png: bytes, keyword: bytes, text: bytes) -> bytes:
    """Return the picture with a tEXt chunk added after its header chunk. Raises: `ValueError` for another format."""
    if not png.startswith(PNG_HEAD):
        raise ValueError("not a PNG")
    header_end = len(PNG_HEAD) + 8 + struct.unpack(">I", png[8:12])[0] + 4
    body = b"tEXt" + keyword + b"\0" + text
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:header_end] + chunk + png[header_end:]
