"""Profiles of this repository's own tests: ``ci``, ``dev`` and ``nightly``, by ``--hypothesis-profile``."""

from __future__ import annotations

import signal

from equivcheck.profiles import register_profiles

register_profiles(prefix="")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Of a shell's background job interrupts are ignored, and then by every process that it starts: tests interrupt some.
    signal.signal(signal.SIGINT, signal.default_int_handler)
