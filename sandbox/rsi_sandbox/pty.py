"""A shell on a pseudo-terminal, for harnesses that type keystrokes and read a screen."""

import contextlib
import os
import select
import time
from typing import Any

from .records import SandboxError
from .shell import Output


class Screen:
    """The host's end of one pseudo-terminal, `file`.

    Keys are bytes as a terminal sends them: "\\x03" is Ctrl-C, "\\x04" Ctrl-D, "\\x1b[A" the up arrow.
    """

    def __init__(self, file: Any):
        self._descriptor, self._file = file.fileno(), file
        os.set_blocking(self._descriptor, False)

    def type(self, keys: str, seconds: float) -> str:
        """Type `keys`, wait `seconds`, and return what was written since the last call: without control sequences,
        half from its head and half from its tail where it is long. Raises SandboxError when the shell has ended.
        """
        if self._descriptor < 0:
            raise SandboxError("the terminal is closed")
        collected = Output()
        left = keys.encode(errors="surrogateescape")
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0 or left:
            if remaining < -10:
                raise SandboxError("the terminal takes no more keys")
            room = select.poll()
            room.register(self._descriptor, select.POLLIN | (select.POLLOUT if left else 0))
            for _, event in room.poll(max(0.0, remaining) * 1000 if not left else 100):
                try:
                    if event & select.POLLOUT and left:
                        left = left[os.write(self._descriptor, left[:1024]) :]
                    if event & (select.POLLIN | select.POLLHUP):
                        data = os.read(self._descriptor, 1 << 16)
                        if not data:
                            raise OSError("it ended")
                        collected.feed(data)
                except BlockingIOError:
                    continue
                except OSError as error:
                    if collected.total:
                        return collected.text()[0]
                    raise SandboxError(f"the terminal's shell has ended ({error})") from None
        return collected.text()[0]

    def close(self) -> None:
        """Hang up; harmless when repeated."""
        if self._descriptor >= 0:
            self._descriptor = -1
            with contextlib.suppress(OSError):
                self._file.close()
