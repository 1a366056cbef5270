"""Events: everything here has happened when a call returns."""

from __future__ import annotations


class EventHandle:
    """A CUDA event's handle."""


class EventOverlap:
    """What a call that runs on a stream of its own returns."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""
