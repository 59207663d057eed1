"""Decide on devices: how many ranks a run has unless somebody says, and where each rank of a host computes.

These are decisions alone. `visible.py` asks PyTorch what there is.

    visible      asked for     ranks, and where they compute
    nothing      nothing       2 on the CPU
    1 x cuda     nothing       1 on cuda:0
    4 x cuda     nothing       4, each on its own device
    1 x cuda     2 ranks       2 that share cuda:0
    2 x cuda     3 ranks       cuda:0, cuda:1, and cuda:0 again
    2 x cuda     cuda:1        1 on cuda:1
    anything     cpu           2 on the CPU
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.errors import DrumlineError, UsageError

CPU_RANKS = 2  # where there is no accelerator to count
_OTHER_NAMES = ("gpu", "nvidia", "rocm", "hip", "metal")  # of accelerators that PyTorch calls something else


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The accelerators that a process can use, by PyTorch's name of their kind.

    `hidden_by` names the variable of the environment that lists none.

    >>> str(VisibleDevices("cuda", 2)), str(VisibleDevices())
    ('cuda:0 and cuda:1', 'no accelerator')
    >>> str(VisibleDevices("cuda", 8)), str(VisibleDevices(hidden_by="CUDA_VISIBLE_DEVICES"))
    ('cuda:0 to cuda:7', 'no accelerator (CUDA_VISIBLE_DEVICES lists none)')
    """

    kind: str = ""
    count: int = 0
    hidden_by: str = ""

    def __str__(self) -> str:
        if not self.count:
            return "no accelerator" + (f" ({self.hidden_by} lists none)" if self.hidden_by else "")
        first, last = f"{self.kind}:0", f"{self.kind}:{self.count - 1}"
        return first if self.count == 1 else f"{first} {'and' if self.count == 2 else 'to'} {last}"


@dataclass(frozen=True, slots=True)
class AskedDevice:
    """The device that a user names; without a kind, nobody names one.

    >>> AskedDevice.read("cuda:1"), AskedDevice.read("")
    (AskedDevice(kind='cuda', index=1), AskedDevice(kind='', index=None))
    """

    kind: str = ""
    index: int | None = None

    @classmethod
    def read(cls, text: str, visible: VisibleDevices | None = None) -> AskedDevice:
        """Return what a text names, as PyTorch spells devices; refuse another spelling, with what is visible in place.

        >>> AskedDevice.read("cuda:first")
        Traceback (most recent call last):
        drumline.core.errors.UsageError: device is 'cuda:first'; expected a PyTorch device, such as cpu or cuda:0
        """
        kind, colon, index = text.partition(":")
        plain = not text or (kind.isascii() and kind.isalpha() and kind.islower() and (not colon or index.isdecimal()))
        if not plain or kind in _OTHER_NAMES:
            meant = kind.lower() if kind.lower() not in _OTHER_NAMES else visible.kind if visible else ""
            fix = f"use {meant}{f':{index}' if index.isdecimal() else ''}" if meant and meant != kind else ""
            raise UsageError(f"device is {text!r}", expected="a PyTorch device, such as cpu or cuda:0", fix=fix)
        return cls(kind, int(index) if index else None)

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def refusal(asked: AskedDevice, visible: VisibleDevices, num_processes: int = 1) -> DrumlineError | None:
    """Return why processes of this host cannot compute on a device, if they cannot.

    >>> print(refusal(AskedDevice("cuda", 2), VisibleDevices("cuda", 2)))
    device is 'cuda:2', but this process sees cuda:0 and cuda:1; expected cpu, cuda, or one of cuda:0 and cuda:1
    >>> refusal(AskedDevice("cuda"), VisibleDevices("cuda", 1)) is None
    True
    """
    if asked.kind == "cpu" and asked.index:
        return UsageError(f"device is '{asked}'", expected="cpu: PyTorch knows one of them")
    if asked.kind in ("", "cpu"):
        return None
    expected = f"cpu, {visible.kind}, or one of {visible}" if visible.count > 1 else f"cpu or {visible}"
    expected = expected if visible.count else "cpu"
    if asked.kind != visible.kind or not visible.count:
        unhide = f"unset {visible.hidden_by}, or list devices in it" if visible.hidden_by else ""
        return UsageError(
            f"device is '{asked}', but PyTorch finds no such device: this process sees {visible}",
            expected=expected,
            fix=unhide,
        )
    if asked.index is not None and asked.index >= visible.count:
        return UsageError(f"device is '{asked}', but this process sees {visible}", expected=expected)
    if asked.kind == "mps" and num_processes > 1:
        return UsageError(
            f"{num_processes} processes on mps: Apple's GPU is not supported by several of ours at once",
            expected="one process on mps",
            fix="use one rank, transport in-process, or device cpu",
        )
    return None


def default_num_ranks(visible: VisibleDevices, asked: AskedDevice, num_lines: int = 1) -> int:
    """Return how many ranks a pipeline has if nobody says: one for each accelerator, two without any.

    A mesh has `num_lines` pipelines, which share the accelerators out.

    >>> default_num_ranks(VisibleDevices("cuda", 8), AskedDevice(), num_lines=2)
    4
    >>> default_num_ranks(VisibleDevices("cuda", 8), AskedDevice("cpu"))
    2
    """
    if asked.kind == "cpu" or not visible.count:
        return CPU_RANKS
    return 1 if asked.index is not None else max(1, visible.count // num_lines)


def device_of_rank(local_rank: int, visible: VisibleDevices, asked: AskedDevice) -> AskedDevice:
    """Return where a rank computes, by its number on its host: on the accelerator of that number, then from 0 again.

    >>> [str(device_of_rank(rank, VisibleDevices("cuda", 2), AskedDevice())) for rank in range(3)]
    ['cuda:0', 'cuda:1', 'cuda:0']
    >>> str(device_of_rank(0, VisibleDevices(), AskedDevice()))
    'cpu'
    """
    if asked.kind == "cpu" or not visible.count:
        return AskedDevice("cpu")
    return AskedDevice(visible.kind, local_rank % visible.count if asked.index is None else asked.index)


def kind_for(num_processes: int, visible: VisibleDevices) -> str:
    """Return the kind of device that processes of a host compute on if nobody names one.

    >>> kind_for(2, VisibleDevices("cuda", 1)), kind_for(2, VisibleDevices())
    ('cuda', 'cpu')
    """
    asked = AskedDevice(visible.kind)
    return visible.kind if visible.count and refusal(asked, visible, num_processes) is None else "cpu"


def too_many_text(num_ranks: int, visible: VisibleDevices, asked: AskedDevice) -> str:
    """Return what to say, before they start, of more ranks on this host than it has accelerators; else nothing.

    >>> too_many_text(2, VisibleDevices("cuda", 1), AskedDevice())
    '2 ranks were asked for, and this process sees cuda:0: they share it, which is slow'
    >>> too_many_text(2, VisibleDevices("cuda", 2), AskedDevice())
    ''
    """
    if asked.kind == "cpu" or not visible.count:
        return ""
    if num_ranks > 1 and kind_for(num_ranks, visible) == "cpu":
        return f"{num_ranks} ranks were asked for, and {visible} takes one process: they compute on the CPU"
    if asked.index is not None and num_ranks > 1:
        return f"{num_ranks} ranks were asked for on {asked} alone: they share it, which is slow"
    if num_ranks <= visible.count:
        return ""
    them = "it" if visible.count == 1 else "them"
    return f"{num_ranks} ranks were asked for, and this process sees {visible}: they share {them}, which is slow"
