"""Two namespaces are two nodes: their traffic is limited and counted, and nothing else is."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# As for the benchmarks' own imports; at the end, for their names are common ones.
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from two_nodes import limit_rate, link_bytes, run_two_nodes, why_not

SIZE_BYTES = 4_000_000

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def namespace() -> int:
    return os.stat("/proc/self/ns/net").st_ino


def add_up() -> dict[str, object]:
    number = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(number)
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "sum": number.item(),
        "numbers": [int(os.environ[name]) for name in names],
        "host": socket.gethostname(),
        "namespace": namespace(),
    }


def send_and_count(source: int, target: int) -> tuple[int, int, float]:
    """Return what this rank's node sent and received meanwhile, and the seconds of the send."""
    answer = torch.zeros(1)
    data = torch.full((SIZE_BYTES,), 1 + dist.get_rank(), dtype=torch.uint8)
    dist.barrier()
    before = link_bytes()
    dist.barrier()  # nobody sends before everybody has read
    start = time.perf_counter()
    if dist.get_rank() == source:
        dist.send(data, target)
        dist.recv(answer, target)
    elif dist.get_rank() == target:
        dist.recv(data, source)
        dist.send(answer, source)
    seconds = time.perf_counter() - start
    dist.barrier()
    after = link_bytes()
    assert dist.get_rank() != target or (data == 1 + source).all()
    return after.sent - before.sent, after.received - before.received, seconds


def time_sends(later_bytes_per_s: float) -> list[float]:
    """Return the seconds of the fastest of five sends there, and of five back at the later rate."""
    there_s = min(send_and_count(0, 3)[2] for _ in range(5))
    if os.environ["LOCAL_RANK"] == "0":
        limit_rate(later_bytes_per_s)
    back_s = min(send_and_count(3, 0)[2] for _ in range(5))
    return [there_s, back_s]


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError(f"rank 1 is in namespace {namespace()}")
    dist.barrier()


def hang_on_rank_2() -> None:
    if dist.get_rank() == 2:
        time.sleep(600)


def links_and_names() -> list[set[str]]:
    """Return the names of this machine's interfaces and of its named namespaces."""
    listings: list[set[str]] = []
    for words in (["-brief", "link"], ["netns", "list"]):
        answer = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
        listings.append({line.split()[0] for line in answer.stdout.splitlines()})
    return listings


def users(net: int) -> list[str]:
    """Return the processes in a network namespace, and this process's open files of it."""
    found: list[str] = []
    for path in [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc/self/fd").iterdir()]:
        try:
            if path.stat().st_ino == net and "net:" in str(path.readlink()):
                found.append(str(path))
        except OSError:  # it has ended
            continue
    return found


def test_ranks_form_one_world_on_two_nodes_and_leave_nothing() -> None:
    before = links_and_names()
    answers = run_two_nodes(add_up)
    assert [answer["sum"] for answer in answers] == [1111.0] * 4
    assert [answer["numbers"] for answer in answers] == [
        [0, 0, 0, 4, 2],
        [1, 1, 0, 4, 2],
        [2, 0, 1, 4, 2],
        [3, 1, 1, 4, 2],
    ]
    assert [answer["host"] for answer in answers] == ["node0", "node0", "node1", "node1"]
    nets = [answer["namespace"] for answer in answers]
    assert nets[0] == nets[1] != nets[2] == nets[3]
    assert namespace() not in nets
    assert users(namespace()), "users() sees nothing"
    assert [users(net) for net in nets] == [[]] * 4
    assert links_and_names() == before


def test_counters_count_what_goes_between_nodes() -> None:
    """Within 5 %: frames have headers (1 %), and TCP may send a lost packet again."""
    answers = run_two_nodes(send_and_count, 1, 2, bytes_per_s=100e6)
    for rank, (sent, received, _) in enumerate(answers):
        over, back = (sent, received) if rank < 2 else (received, sent)
        assert SIZE_BYTES <= over <= 1.05 * SIZE_BYTES
        assert back <= 0.02 * SIZE_BYTES  # acknowledgements


@pytest.mark.parametrize(("source", "target"), [(0, 1), (3, 2)])
def test_counters_do_not_count_what_stays_inside_a_node(source: int, target: int) -> None:
    for sent, received, _ in run_two_nodes(send_and_count, source, target):
        assert sent + received < 0.02 * SIZE_BYTES


def test_a_byte_between_nodes_takes_its_time() -> None:
    """Not less than 95 %: 2 % may go out at once. More, on a busy machine, says nothing."""
    there_s, back_s = run_two_nodes(time_sends, 50e6, bytes_per_s=25e6)[0]
    assert there_s >= 0.95 * SIZE_BYTES / 25e6
    assert back_s >= 0.95 * SIZE_BYTES / 50e6


def test_error_of_a_rank_is_reported_and_nothing_left() -> None:
    before = links_and_names()
    with pytest.raises(RuntimeError, match="rank 1: Traceback") as caught:
        run_two_nodes(raise_on_rank_1)
    text = str(caught.value)
    assert "in raise_on_rank_1" in text
    net = re.search(r"ValueError: rank 1 is in namespace (\d+)", text)
    assert net is not None
    assert users(int(net[1])) == []
    assert links_and_names() == before


def test_rank_that_hangs_is_named() -> None:
    run_two_nodes(namespace)  # the first call imports torch, which may take longer than that
    with pytest.raises(TimeoutError, match=r"ranks \[2\] did not finish in 5 s"):
        run_two_nodes(hang_on_rank_2, timeout_s=5)


@pytest.mark.parametrize("bytes_per_s", [0, -1.0])
def test_rate_must_be_positive(bytes_per_s: float) -> None:
    before = links_and_names()
    with pytest.raises(ValueError, match="must be 1 or more"):
        run_two_nodes(add_up, bytes_per_s=bytes_per_s)
    assert links_and_names() == before
