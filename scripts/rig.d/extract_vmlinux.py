"""Writes the ELF kernel that is packed (xz or gzip) in a bzImage: extract_vmlinux.py BZIMAGE OUT."""

from __future__ import annotations

import lzma
import struct
import sys
import zlib
from pathlib import Path


def unpack(image: bytes) -> bytes:
    """The payload's place is in the setup header: Linux x86 boot protocol, payload_offset and payload_length."""
    if image[0x202:0x206] != b"HdrS":
        raise ValueError("not a bzImage")
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (image[0x1F1] + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zXZ\0"):
        elf = lzma.LZMADecompressor().decompress(payload)
    elif payload.startswith(b"\x1f\x8b"):
        elf = zlib.decompressobj(31).decompress(payload)
    else:
        raise ValueError(f"the payload starts with {payload[:6].hex()}: neither xz nor gzip")
    if not elf.startswith(b"\x7fELF"):
        raise ValueError("the payload is no ELF file")
    return elf


if __name__ == "__main__":
    try:
        Path(sys.argv[2]).write_bytes(unpack(Path(sys.argv[1]).read_bytes()))
    except ValueError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
