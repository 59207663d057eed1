"""Messages and tensors on their way: order, forms, conjugates, pieces."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from drumline.channel.in_process import Hub
from drumline.channel.layout import MessageLayouts
from drumline.channel.link import Link
from drumline.channel.shared_memory import Slot, new_memory
from drumline.core.action import Action
from drumline.core.errors import RunError
from drumline.model.values import joined
from drumline.model.weights import files as weights
from refused import refused

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def test_a_message_that_meets_another_ones_receive_is_refused() -> None:
    channel, other = Hub(2).channels()
    channel.begin(0)
    other.begin(0)
    other.post(Action.parse("1RECV_F1"), 0)
    with refused(RunError, "rank 0 sends 1RECV_F0 but rank 1 expects 1RECV_F1"):
        channel.send(Action.parse("1RECV_F0"), 1, [torch.ones(1)], None)


def test_forms_that_are_equal_and_not_the_same_have_layouts_of_their_own() -> None:
    layouts, tensor = MessageLayouts(), torch.ones(2)
    found = [layouts.find([tensor], form) for form in (1, True, 1.0, (1, 2), (True, 2))]
    assert len({layout.number for layout in found}) == len(found)
    assert [type(layout.form) for layout in found[:3]] == [int, bool, float]
    assert layouts.find([tensor], True) is found[1]


def test_packets_arrive_in_the_order_in_which_they_were_sent() -> None:
    left, right = (Link(peer, end) for peer, end in enumerate(socket.socketpair()))
    heard: list[int] = []

    def note(peer: int, packet: bytes, fds: list[int]) -> None:
        heard.append(int.from_bytes(packet[1:5], "little"))

    def packet(number: int, size: int) -> bytes:
        return b"\x05" + number.to_bytes(4, "little") + bytes(size)

    sent = 0
    while left.send(packet(sent, 20_000)):
        sent += 1
    right.read([note] * 256)  # makes room for something small
    right.read([note] * 256)
    for _ in range(3):
        sent += 1
        left.send(packet(sent, 1))
    while len(heard) <= sent:
        left.push()
        right.read([note] * 256)
    assert heard == list(range(sent + 1))
    left.close()
    right.close()


def test_conjugates_and_negatives_are_copied_as_what_they_mean() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    slot = Slot(0, new_memory(4096), 4096)
    for tensor in (numbers.conj(), numbers.conj().imag):
        layout = MessageLayouts().find([tensor], None)
        slot.fill(layout, [tensor])
        assert torch.equal(slot.copies(layout, CPU)[0], tensor.resolve_conj().resolve_neg())


def test_an_output_without_dimensions_is_the_mean_by_shares() -> None:
    values = [torch.tensor(2.0), torch.tensor(5.0)]
    assert joined(values, [torch.tensor(0.75), torch.tensor(0.25)]) == pytest.approx(2.75)
    assert joined(values) == pytest.approx(3.5)


def test_a_tensor_larger_than_the_buffer_is_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = torch.arange(1000, dtype=torch.float32)
    torch.save({"weight": wanted}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(weights, "_BUFFER_BYTES", 256)
    target = torch.empty(1000, dtype=torch.float64)
    weights.Weights(tmp_path).tensors["weight"].into(target)
    assert torch.equal(target, wanted.double())
