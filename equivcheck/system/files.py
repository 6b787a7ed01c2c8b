"""Read files that users name, replace files safely, and share files that have no name."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import IO, BinaryIO

from equivcheck.errors import UsageError

MAX_BYTES = 16 * 2**20
"""Maximum file size in bytes. Scenarios have some thousand bytes, findings with the stacks of 64 ranks less than a million."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


class UnreadableFile(UsageError):
    """A file that the user named cannot be read, or is not a regular text file. The message contains its path."""


def read_text(path: Path | str) -> str:
    """Return the text of a regular UTF-8 file with at most `MAX_BYTES` bytes. Raises `UnreadableFile` for other files."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UnreadableFile(f"file {path} is not valid: it is {_KINDS[stat.S_IFMT(mode)]}. Expected a regular file.")
            return read_stream(file, f"file {path}")
    except (OSError, ValueError) as error:  # a ValueError: a zero byte in the path
        if isinstance(error, UnreadableFile):
            raise
        raise UnreadableFile(f"file {path} cannot be read: {getattr(error, 'strerror', '') or error}") from error


def read_stream(stream: BinaryIO, name: str) -> str:
    """Read a stream to its end, and return its UTF-8 text of at most `MAX_BYTES` bytes. Messages call the stream `name`.

    Raises `UnreadableFile` if the stream is longer or is not UTF-8.
    """
    raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise UnreadableFile(f"{name} is not valid: it is too large. Expected at most {MAX_BYTES:,} bytes.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{name} is not valid: byte {error.start} is {raw[error.start]:#04x}. Expected UTF-8 text."
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    # Opening a FIFO without O_NONBLOCK waits for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


def replace_text(file: Path, text: str) -> None:
    """Write a file so that readers see either the old or the new content, even if the disk is full."""
    written = file.with_name(f"{file.name}.part")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise


def unnamed_file(num_bytes: int) -> IO[bytes]:
    """Create an unnamed file with `num_bytes` zero bytes for memory mapping. It lies in memory if the system supports this.

    The zeros are written at once, because touching a mapped page without disk space would kill the process.
    """
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("equivcheck"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by those who share it
    file.write(bytes(num_bytes))
    file.flush()
    return file
