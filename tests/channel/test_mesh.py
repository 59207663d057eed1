"""The mesh between ranks that share this process: each is connected in a thread of its own and then used from one."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from drumline.channel import mesh as mesh_module
from drumline.channel import rendezvous
from drumline.channel.mesh import FIRST_OWN_KIND, ControlMesh
from drumline.channel.rendezvous import connect, exchange
from drumline.channel.shared_memory import SharedMemoryChannel
from drumline.core.errors import RankFailed, RunError, WaitTimeout
from refused import refused

pytestmark = pytest.mark.torch

OWN = FIRST_OWN_KIND
TCP = ("one", "two", "three")


def deadline(seconds: float = 200.0) -> int:
    return time.perf_counter_ns() + int(seconds * 1e9)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run all calls in threads and return their results, or raise what the first of them raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


Meshes = Callable[..., list[ControlMesh]]


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    made: list[ControlMesh] = []

    def make(
        num_ranks: int = 3, hosts: Sequence[str | None] = (None,) * 3, store: Store | None = None
    ) -> list[ControlMesh]:
        shared = HashStore() if store is None else store

        def mesh(rank: int) -> ControlMesh:
            return ControlMesh(rank, num_ranks, store=shared, timeout=200, host=hosts[rank])

        made.extend(at_once(*(lambda rank=rank: mesh(rank) for rank in range(num_ranks))))
        return made[-num_ranks:]

    yield make
    for mesh in made:
        crash(mesh)


def crash(mesh: ControlMesh) -> None:
    """End as a killed process does: the kernel closes its sockets."""
    mesh._closed = True
    for link in mesh.links.values():
        link.close()


def nothing() -> tuple[int, ...]:
    return ()


def wait_for_ever(mesh: ControlMesh) -> None:
    mesh.wait(lambda: False, "a wait without an end", deadline(), needs=nothing)


def test_ranks_of_one_host_are_joined_by_unix_sockets_and_others_by_tcp(meshes: Meshes) -> None:
    first, second, third = meshes(hosts=("one", "one", "two"))
    families = [{peer: link._socket.family for peer, link in mesh.links.items()} for mesh in (first, second, third)]
    unix, tcp = socket.AF_UNIX, socket.AF_INET
    assert families == [{1: unix, 2: tcp}, {0: unix, 2: tcp}, {0: tcp, 1: tcp}]


@pytest.mark.parametrize("hosts", [(None,) * 3, TCP])
def test_packets_of_any_length_arrive_whole_and_in_order(meshes: Meshes, hosts: Sequence[str | None]) -> None:
    first, second, _ = meshes(hosts=hosts)
    packets = [
        bytes((OWN,)) + bytes([n % 256]) * length for n, length in enumerate([0, 1, 40_000, 5, 1_000_000, 32_767])
    ]
    got: list[bytes] = []
    second.on(OWN, lambda source, packet, fds: got.append(packet))
    for packet in packets:
        first.send_packet(1, packet)
    while len(got) < len(packets):
        first.pump()  # what the kernel did not take at once
        second.pump()
    assert got == packets


@pytest.mark.parametrize("hosts", [(None,) * 3, TCP])
def test_sending_never_blocks_however_little_the_other_reads(meshes: Meshes, hosts: Sequence[str | None]) -> None:
    first, second, _ = meshes(hosts=hosts)
    num_packets = 5000
    numbers: list[int] = []
    second.on(OWN, lambda source, packet, fds: numbers.append(int.from_bytes(packet[1:9], "little")))
    for number in range(num_packets):
        first.send_packet(1, bytes((OWN,)) + number.to_bytes(8, "little") + bytes(1000))
    assert not first.all_sent
    while not first.all_sent:
        first.pump()
        second.pump()
    second.pump()
    assert numbers == list(range(num_packets))


def test_descriptors_travel_and_are_closed_by_the_sender(meshes: Meshes) -> None:
    first, second, _ = meshes()
    came: list[int] = []
    second.on(OWN, lambda source, packet, fds: came.extend(fds))
    read, write = os.pipe()
    first.send_packet(1, bytes((OWN,)), (write,))
    second.pump()
    os.write(came[0], b"through the copy")
    os.close(came[0])
    os.set_blocking(read, False)
    assert os.read(read, 100) == b"through the copy"
    assert os.read(read, 100) == b"", "somebody still holds the other end"
    os.close(read)


def test_descriptors_come_with_their_own_packet_however_much_waits_before_it(meshes: Meshes) -> None:
    first, second, _ = meshes()
    came: list[tuple[int, list[int]]] = []
    second.on(OWN, lambda source, packet, fds: came.append((len(packet), fds)))
    sent = [(1_000_000, 0), (2, 1), (3, 0), (500_000, 2), (4, 1)]
    for length, num_fds in sent:
        first.send_packet(
            1, bytes((OWN,)) + bytes(length - 1), [os.open(os.devnull, os.O_RDONLY) for _ in range(num_fds)]
        )
    while len(came) < len(sent):
        first.pump()
        second.pump()
    assert [(length, len(fds)) for length, fds in came] == sent
    for fd in (fd for _, fds in came for fd in fds):
        os.close(fd)


@pytest.mark.parametrize("hosts", [(None,) * 3, TCP])
def test_an_abort_reaches_everybody_with_rank_action_and_error(meshes: Meshes, hosts: Sequence[str | None]) -> None:
    first, second, third = meshes(hosts=hosts)
    third.abort(KeyError("weight"), "2B4")
    third.close()
    for mesh in (first, second):
        with pytest.raises(RankFailed, match=r"^rank 2 failed at 2B4: KeyError: 'weight'$") as caught:
            wait_for_ever(mesh)
        assert caught.value.rank == 2


def test_who_fails_of_another_names_that_one(meshes: Meshes) -> None:
    first, second, third = meshes()
    third.abort(ValueError("x"), "2F0")
    with pytest.raises(RankFailed) as caught:
        wait_for_ever(second)
    # Rank 0 hears of it from rank 1 alone.
    first.links[2].close()
    first._poller.unregister(first.links[2].fd)
    second.abort(caught.value, "1F0")
    with pytest.raises(RankFailed, match=r"^rank 2 failed at 2F0: ValueError: x$"):
        wait_for_ever(first)


@pytest.mark.parametrize("hosts", [(None,) * 3, TCP])
def test_a_crash_is_named(meshes: Meshes, hosts: Sequence[str | None]) -> None:
    first, second, third = meshes(hosts=hosts)
    first.send_packet(1, bytes((OWN,)))  # left unread: the kernel then says "reset" instead of "end"
    crash(second)
    for mesh in (first, third):
        with pytest.raises(RankFailed, match="rank 1 died") as caught:
            wait_for_ever(mesh)
        assert caught.value.rank == 1


# ---- who waits for whom ----------------------------------------------------------------------------------------------


@contextmanager
def others_do(*runs: Callable[[Callable[[], bool]], object]) -> Iterator[None]:
    """Have other ranks do something in threads, which is given what says that they may stop."""
    over = threading.Event()
    threads = [threading.Thread(target=run, args=(over.is_set,)) for run in runs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def waiting(mesh: ControlMesh, what: Any, needs: tuple[int, ...]) -> Callable[[Callable[[], bool]], object]:
    return lambda over: mesh.wait(over, what, deadline(), needs=lambda: needs, every_ms=5)


def too_late(mesh: ControlMesh, peers: Sequence[ControlMesh], needs: int) -> str:
    """Return what a rank says whose wait is over at once, when those peers wait as well."""
    while any(peer._waiting is None for peer in peers):
        time.sleep(0.001)
    with pytest.raises(WaitTimeout) as caught:
        mesh.wait(lambda: False, f"rank {mesh.rank} waits", 0, needs=lambda: (needs,))
    return str(caught.value)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give answers all the time that a busy machine may need."""
    monkeypatch.setattr(mesh_module, "GRACE", 100.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("hosts", [(None,) * 3, TCP])
def test_a_wait_that_took_too_long_names_the_rank_at_the_end_of_the_chain(
    meshes: Meshes, hosts: Sequence[str | None]
) -> None:
    first, second, third = meshes(hosts=hosts)
    words = iter(["rank 2 waits for its data"])
    with others_do(
        waiting(second, "rank 1 at 1F0 waits for 2B4 of rank 2", (2,)), waiting(third, lambda: next(words), ())
    ):
        said = too_late(first, (second, third), 1)
    assert "(rank 1 at 1F0 waits for 2B4 of rank 2; rank 2 waits for its data)" in said


@pytest.mark.usefixtures("patient")
def test_ranks_that_wait_for_each_other_in_a_circle_are_named_once(meshes: Meshes) -> None:
    first, second, third = meshes()
    with others_do(waiting(second, "rank 1 waits for rank 2", (2,)), waiting(third, "rank 2 waits for rank 0", (0,))):
        said = too_late(first, (second, third), 1)
    assert "(rank 1 waits for rank 2; rank 2 waits for rank 0)" in said


@pytest.mark.usefixtures("patient")
def test_a_rank_that_waits_for_nobody_says_so(meshes: Meshes) -> None:
    first, second, _ = meshes()

    def looks(over: Callable[[], bool]) -> None:
        while not over():
            second.pump()

    with others_do(looks):
        assert "(rank 1 is not waiting for any rank)" in too_late(first, (), 1)


def test_a_rank_that_does_not_answer_ends_the_chain(meshes: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "GRACE", 0.01)
    first, _, _ = meshes()
    assert "(rank 1 does not answer: it is computing or hangs)" in too_late(first, (), 1)


@pytest.mark.usefixtures("patient")
def test_the_wait_is_over_for_others_once_it_has_ended(meshes: Meshes) -> None:
    _, second, _ = meshes()
    second.wait(lambda: True, "rank 1 waits", deadline(), needs=lambda: (2,))
    assert second._waiting is None


# ---- failures --------------------------------------------------------------------------------------------------------


def test_an_abort_that_comes_after_a_crash_explains_it(meshes: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = meshes()
    crash(second)
    monkeypatch.setattr(mesh_module, "GRACE", 30.0)
    late = threading.Timer(0.1, third.abort, (ValueError("the cause"), "2F0"))
    late.start()
    with pytest.raises(RankFailed, match="rank 2 failed at 2F0: ValueError: the cause"):
        wait_for_ever(first)
    late.join()


def test_what_a_rank_said_before_it_crashed_is_still_heard(meshes: Meshes) -> None:
    first, second = meshes(2)
    second.tell("topic", "last words")
    first.tell("topic", "")
    crash(second)
    assert first.hear("topic", deadline()) == ["", "last words"]


def test_an_end_with_goodbye_is_no_failure(meshes: Meshes) -> None:
    first, second, third = meshes()
    for mesh in (first, second, third):
        mesh.tell("topic", mesh.rank)
    third.close()
    third.close()
    assert first.hear("topic", deadline()) == [0, 1, 2]
    with pytest.raises(WaitTimeout):
        first.wait(lambda: False, "rank 0 waits", deadline(0.01), needs=lambda: (1,))
    with pytest.raises(RankFailed, match="rank 2 closed its channel while rank 0 was still waiting for it"):
        first.wait(lambda: False, "rank 0 waits", deadline(), needs=lambda: (1, 2))


def test_a_second_mesh_over_the_same_store_is_another_one(meshes: Meshes) -> None:
    store = HashStore()
    old, _ = meshes(2, store=store)
    new, peer = meshes(2, store=store)
    peer.tell("topic", "for the new one")
    new.tell("topic", "")
    assert new.hear("topic", deadline()) == ["", "for the new one"]
    with refused(WaitTimeout, "rank 0 waits for rank 0 to send 'topic'"):
        old.hear("topic", deadline(0.01))


def test_connecting_is_bounded_and_names_who_is_missing() -> None:
    with refused(WaitTimeout, "rank 0 waits for rank 1 to report its drumline/host"):
        ControlMesh(0, 2, store=HashStore(), timeout=0.05)


def told(store: Store, topic: str, value: Any) -> None:
    """Put what rank 1 would tell into the store, as if it had come by already."""
    with refused(WaitTimeout, "rank 1 waits for rank 0 to report"):
        exchange(store, 1, 2, topic, value, timeout=0.001)


def test_a_rank_that_never_connects_is_named() -> None:
    store = HashStore()
    told(store, "drumline/host", "here")
    told(store, "drumline/address", rendezvous.Card("here", b"", b""))
    with refused(WaitTimeout, "rank 0 waits for rank 1 to connect"):
        connect(0, 2, store=store, timeout=0.5, host="here")


def test_a_rank_that_does_not_answer_is_named() -> None:
    store = HashStore()

    def only_tells() -> None:
        exchange(store, 0, 2, "drumline/host", "here", timeout=200)
        exchange(store, 0, 2, "drumline/address", rendezvous.Card("here", b"", b"\0drumline-nobody"), timeout=200)

    with refused(RunError, r"rank 1 cannot connect to rank 0 .*refused"):
        at_once(only_tells, lambda: connect(1, 2, store=store, timeout=200, host="here"))


def test_a_stranger_is_turned_away() -> None:
    store = HashStore()

    def stranger_then_rank() -> Any:
        exchange(store, 1, 2, "drumline/host", "here", timeout=200)
        mine = rendezvous.Card("here", b"m" * 16, b"")
        cards = exchange(store, 1, 2, "drumline/address", mine, timeout=200)
        answers = []
        for token in (b"?" * 16, cards[0].token):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(cards[0].unix)
                caller.sendall(rendezvous._HELLO.pack(token, 1))
                answers.append(caller.recv(16))
        return answers

    answers, links = at_once(stranger_then_rank, lambda: connect(0, 2, store=store, timeout=200, host="here"))
    assert answers == [b"", b"m" * 16]
    assert [link.peer for link in links] == [1]
    for link in links:
        link.close()


@pytest.mark.parametrize("hosts", [(None,) * 3, TCP])
def test_clocks_are_compared_both_ways_by_the_quickest_packet(meshes: Meshes, hosts: Sequence[str | None]) -> None:
    ahead_ns = 5_000_000_000_000
    first, second, third = ranks = meshes(hosts=hosts)
    second.now = lambda: time.perf_counter_ns() + ahead_ns
    at_once(*(lambda rank=rank: rank.compare_clocks(deadline()) for rank in ranks))
    for mesh in ranks:
        mesh.pump()
    (_, left, came), (source, *_) = second.comparisons()
    assert source == 2
    assert 0 <= came - left - ahead_ns < 60_000_000_000
    (_, back, here), _ = first.comparisons()
    assert 0 <= here - back + ahead_ns < 60_000_000_000
    assert first.comparisons() == []
    third.tell("a word", 1)
    first.pump()
    (word,) = first.comparisons()
    assert word[0] == 2
    assert word[1] <= word[2]


def test_shared_memory_between_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(rendezvous, "host_id", lambda: threading.current_thread().name)
    with refused(RunError, "rank 0 does not share a host with rank 1"):
        at_once(*(lambda rank=rank: SharedMemoryChannel(rank, 2, store=store) for rank in (0, 1)))
