# SPDX-License-Identifier: Apache-2.0

"""Two nodes on one machine: two network namespaces, joined by a cable of limited rate.

    results_by_rank = run_two_nodes(fn, *args, ranks_per_node=2, bytes_per_s=50e6)

calls `fn(*args)` on the ranks of one gloo world: 0 .. K-1 are processes in the first namespace,
K .. 2K-1 in the second. Ranks of one node talk over its loopback, ranks of different nodes over a
veth pair, whose ends each send at most `bytes_per_s` (a token bucket, tc-tbf). So a byte between
nodes costs real time, and the kernel counts it: `link_bytes()`. Nothing can be left behind: the
namespaces have no names, they and the cable inside end with the last process in them, and ranks
end with their caller, even if it is killed.

Beware that a send of gloo waits for the receiver's word, and that two ranks share one connection.
If both send before they receive, the word may queue behind the other's data, and the directions
take turns: twice the time. Post receives first.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

NODES = 2
LINK = "cable"  # each end's name, in its own namespace
MTU_BYTES = 9000  # large frames: headers are 1 % of what is sent, not 4 %
# What goes out at once after a pause: little, so that small messages take their time too, but the
# largest packet that TCP hands down (64 KiB and headers), or tbf would have to cut it up.
BURST_BYTES = 70_000
QUEUE_BYTES = 64 * 1024 * 1024  # more than TCP ever queues, so that nothing is sent twice
AFTER_ERROR_S = 1.0  # how long the other ranks' errors are awaited
AT_EXIT_S = 10.0  # how long a rank may take to end after its result


class LinkBytes(NamedTuple):
    """Bytes that a node sent and received over the cable, headers included, since its start."""

    sent: int
    received: int


def link_bytes() -> LinkBytes:
    """Return the counters of this rank's node.

    What a finished `send` left in a queue is not counted yet: read them after the receiver's
    answer, or a barrier.
    """
    with open("/proc/thread-self/net/dev") as lines:
        for line in lines:
            name, _, counters = line.partition(":")
            if name.strip() == LINK:
                return LinkBytes(sent=int(counters.split()[8]), received=int(counters.split()[0]))
    raise RuntimeError("no cable here: link_bytes() is for the ranks of run_two_nodes()")


def limit_rate(bytes_per_s: float | None) -> None:
    """Limit what this node sends over the cable, headers included; None lifts the limit.

    `run_two_nodes` has limited both nodes already; a rank of each calls this to change both.
    """
    words = "noqueue"
    if bytes_per_s is not None:  # tc's "bps" is bytes per second
        if bytes_per_s < 1:
            raise ValueError(f"bytes_per_s is {bytes_per_s}; it must be 1 or more, or None")
        words = f"tbf rate {round(bytes_per_s)}bps burst {BURST_BYTES} limit {QUEUE_BYTES}"
    _command(f"tc qdisc replace dev {LINK} root {words}")


@functools.cache
def why_not() -> str | None:
    """Return one sentence that says why two nodes cannot be made here, or None if they can."""
    try:
        with _two_namespaces(bytes_per_s=1e6):
            return None
    except (OSError, AttributeError) as error:  # where it is not Linux, os has no setns
        return f"two network namespaces cannot be made here: {error}"


def run_two_nodes(
    fn: Callable[..., Any],
    *args: Any,
    ranks_per_node: int = 2,
    bytes_per_s: float | None = None,
    timeout_s: float = 120,
) -> list[Any]:
    """Call `fn(*args)` on the ranks of two nodes and return what each returned, by rank.

    `fn` must be importable (a module-level function) and its results picklable. It finds the
    default process group, RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and NODE_RANK set, and
    the host names node0 and node1.

    Raises:
        OSError: if two namespaces cannot be made here (see `why_not`).
        RuntimeError: if a rank raised (its traceback is in the message) or died.
        TimeoutError: if a rank did not finish in time.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo.trace_rules"])
    world_size, call = NODES * ranks_per_node, functools.partial(fn, *args)
    processes: list[Any] = []
    receivers: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder, _two_namespaces(bytes_per_s) as namespaces:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                receivers.append(receiver)
                node, local_rank = divmod(rank, ranks_per_node)
                env = {"RANK": rank, "LOCAL_RANK": local_rank, "NODE_RANK": node}
                env |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": ranks_per_node}
                place = (env, namespaces[node], f"file://{folder}/store", timeout_s, sender, call)
                processes.append(context.Process(target=_be_rank, args=place))
                processes[-1].start()
                sender.close()  # now the rank has the only one, and its death closes the pipe
            answers = _collect(receivers, timeout_s)
            for process in processes:
                process.join(AT_EXIT_S)
            return answers
        finally:
            for process in processes:
                _end(process)


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    """Return what the ranks returned, or raise what went wrong."""
    waiting: dict[Any, int] = {receiver: rank for rank, receiver in enumerate(receivers)}
    answers: dict[int, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + timeout_s
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                error, answers[rank] = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                error = "died without a word"
            if error is not None:
                errors.append(f"rank {rank}: {error}")
                deadline = min(deadline, time.monotonic() + AFTER_ERROR_S)
    if errors:  # in the order of their coming: the first is the cause
        raise RuntimeError("\n".join(errors))
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish in {timeout_s} s")
    return [answers[rank] for rank in range(len(receivers))]


def _be_rank(
    env: dict[str, int], namespace: str, store: str, timeout_s: float, sender: Connection, call: Any
) -> None:
    """Move into the node, join the world, call the function and send what it returned or raised."""
    os.setsid()  # Ctrl-C is the caller's, who ends this rank and all that it started
    threading.Thread(target=_end_with_caller, daemon=True).start()
    os.environ.update({name: str(number) for name, number in env.items()})
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=LINK)
    try:
        _enter(namespace)  # before gloo's threads start: they inherit this thread's namespace
        socket.sethostname(f"node{env['NODE_RANK']}")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store, timeout, env["WORLD_SIZE"], env["RANK"])
        sender.send_bytes(pickle.dumps((None, call())))
        # A rank that leaves early closes its sockets under the others' last collective.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))


def _end_with_caller() -> None:
    if (caller := mp.parent_process()) is not None:
        caller.join()
    os.killpg(0, signal.SIGKILL)


def _end(process: Any) -> None:
    """Kill a rank that still runs, with all that it started."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it has not come to its setsid() yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


@contextlib.contextmanager
def _two_namespaces(bytes_per_s: float | None) -> Iterator[list[str]]:
    """Make two namespaces with a cable between them; yield the paths that lead into them."""
    with contextlib.ExitStack() as stack:
        paths: list[str] = []
        for _ in range(NODES):
            namespace = _inside(None, os.open, "/proc/thread-self/ns/net", os.O_RDONLY)
            stack.callback(os.close, namespace)
            paths.append(f"/proc/{os.getpid()}/fd/{namespace}")
        ends = f"{LINK} type veth peer name {LINK} netns {paths[1]}"
        _inside(paths[0], _command, f"ip link add {ends}")
        for node, path in enumerate(paths):
            _inside(path, _set_up, node, bytes_per_s)
        yield paths


def _set_up(node: int, bytes_per_s: float | None) -> None:
    """Give the node its address; what it sends to that address itself goes over `lo`."""
    _command("ip link set lo up")
    # No IPv6: gloo might choose its address, and its housekeeping would be counted.
    _command(f"ip link set {LINK} mtu {MTU_BYTES} addrgenmode none")
    _command(f"ip address add 192.0.2.{node + 1}/24 dev {LINK}")
    limit_rate(bytes_per_s)
    _command(f"ip link set {LINK} up")


def _enter(namespace: str | None) -> None:
    """Move this thread into a namespace (None: a new one), under a host name of its own."""
    os.unshare(os.CLONE_NEWUTS | (os.CLONE_NEWNET if namespace is None else 0))
    if namespace is not None:
        with open(namespace) as file:
            os.setns(file.fileno(), os.CLONE_NEWNET)


def _inside(namespace: str | None, work: Callable[..., Any], *args: Any) -> Any:
    """Call `work` in a thread of its own, which enters the namespace and ends with the call."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_enter, namespace).result()
        return pool.submit(work, *args).result()


def _command(words: str) -> None:
    program, *rest = words.split()
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise OSError(f"there is no program `{program}` (of iproute2)")
    answer = subprocess.run([path, *rest], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise OSError(f"`{words}`: {' '.join(answer.stderr.split())}")
