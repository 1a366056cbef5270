# SPDX-License-Identifier: Apache-2.0

"""Lanes: where collectives run while the caller computes, and how long it waited for them.

A lane runs what it is given in order, so all ranks of a group issue their messages in one order.

    InlineLane   in the caller, now: nothing overlaps
    ThreadLane   in one thread (gloo: a stage can start only when the one before it has arrived,
                 and somebody must see that)
    StreamLane   on a side stream (NCCL): the host never waits, events order the streams
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch

Span = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass
class Meter:
    """How long collectives took, and how long computation waited for them, since the last `read`.

    Attributes:
        total_s: seconds from the start of each collective to its end.
        exposed_s: seconds of waiting for them.
    """

    total_s: float = 0.0
    exposed_s: float = 0.0
    _total_events: list[Span] = field(default_factory=list)
    _exposed_events: list[Span] = field(default_factory=list)

    def add_events(self, total: Span, exposed: Span) -> None:
        """Count the time between two pairs of CUDA events, when they have happened."""
        self._total_events.append(total)
        self._exposed_events.append(exposed)

    def read(self) -> tuple[float, float]:
        """Return (total_s, exposed_s) and start anew. CUDA: the streams must have come this far."""
        total_s = self.total_s + sum(a.elapsed_time(b) for a, b in self._total_events) / 1e3
        exposed_s = self.exposed_s + sum(a.elapsed_time(b) for a, b in self._exposed_events) / 1e3
        self.total_s = self.exposed_s = 0.0
        self._total_events.clear()
        self._exposed_events.clear()
        return total_s, exposed_s


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the caller (on CUDA: its current stream) may use the results. Call it once.

        Raises:
            RuntimeError: the collective failed.
        """
        ...


class Lane(Protocol):
    """Somewhere to run collectives."""

    def start(self, run: Callable[[], None], meter: Meter) -> Pending:
        """Start `run`, which may use what the caller has computed so far."""
        ...

    def close(self) -> None:
        """Stop; nothing may be under way."""
        ...


def make_lane(device: torch.device, *, overlap: bool) -> Lane:
    """Return the lane for a device."""
    if device.type == "cuda":
        return StreamLane(device, overlap=overlap)
    return ThreadLane() if overlap else InlineLane()


class _Done:
    def wait(self) -> None:
        pass


class InlineLane:
    """Runs collectives in the caller."""

    def start(self, run: Callable[[], None], meter: Meter) -> Pending:
        """Run it, now."""
        begin = time.perf_counter()
        with torch.no_grad():
            run()
        seconds = time.perf_counter() - begin
        meter.total_s += seconds
        meter.exposed_s += seconds
        return _Done()

    def close(self) -> None:
        """Nothing to stop."""


@dataclass
class _InThread:
    future: Future[float]
    meter: Meter

    def wait(self) -> None:
        begin = time.perf_counter()
        self.meter.total_s += self.future.result()
        self.meter.exposed_s += time.perf_counter() - begin


class ThreadLane:
    """Runs collectives in one thread.

    A daemon, and never joined: where this rank fails while its thread waits for a peer, the
    process must end at once, or nobody would notice before the process group's timeout.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="fssdp-collectives", daemon=True).start()

    def _serve(self) -> None:
        # Autograd's mode belongs to a thread.
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                work()

    def start(self, run: Callable[[], None], meter: Meter) -> Pending:
        """Hand it to the thread."""
        future: Future[float] = Future()

        def work() -> None:
            begin = time.perf_counter()
            try:
                run()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(time.perf_counter() - begin)

        self._work.put(work)
        return _InThread(future, meter)

    def close(self) -> None:
        """End the thread when it has done what it has."""
        self._work.put(None)


@dataclass
class _OnStream:
    begin: torch.cuda.Event
    end: torch.cuda.Event
    meter: Meter

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        asked, arrived = _event(), _event()
        asked.record(stream)
        stream.wait_event(self.end)
        arrived.record(stream)
        self.meter.add_events((self.begin, self.end), (asked, arrived))


class StreamLane:
    """Runs collectives on a side stream, ordered against the caller's by events.

    Whatever `run` touches must outlive it: buffers that are kept, parameters, or tensors that the
    handle's owner holds until `wait`. So no tensor needs `record_stream`.
    """

    def __init__(self, device: torch.device, *, overlap: bool) -> None:
        self._stream = torch.cuda.Stream(device)
        self._overlap = overlap

    def start(self, run: Callable[[], None], meter: Meter) -> Pending:
        """Issue it on the side stream, behind what the current stream was given so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        begin, end = _event(), _event()
        with torch.cuda.stream(self._stream), torch.no_grad():
            begin.record(self._stream)
            run()
            end.record(self._stream)
        pending = _OnStream(begin, end, meter)
        if self._overlap:
            return pending
        pending.wait()
        return _Done()

    def close(self) -> None:
        """Nothing to stop."""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
