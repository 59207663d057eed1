"""Two hosts, each with its own torchrun, whose link is cut or slowed while they train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from faults.cases import fault
from faults.config import Config
from faults.lab import SECONDS_TO_FINISH, SECONDS_TO_START, Lab, Skip
from faults.outcome import losses_of
from faults.started import Started
from hosts.namespaces import TwoHosts, two_hosts, why_not

BASE = Config()
IMPATIENT = Config(timeout=15.0)
_SLOW = {"do": "nothing", "rank": 1, "step": 4, "at": "optimizer done", "pace": 0.5}
_CUT = r"rank \d can no longer be reached at .*: the link between the hosts is cut"
_PORT = "29577"


@contextmanager
def _two_hosts() -> Iterator[TwoHosts]:
    if reason := why_not():
        raise Skip(reason)
    with two_hosts() as hosts:
        yield hosts


def _train(lab: Lab, hosts: TwoHosts, config: Config, out: str, *words: str, slow: bool = False) -> list[Started]:
    """Start one rank on each host."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts.addresses[0], "--master-port", _PORT]
    fault = _SLOW if slow else None
    return [
        lab.train(
            config,
            out,
            *words,
            fault=fault,
            torchrun=[*options, "--node-rank", str(number)],
            before=["ip", "netns", "exec", name],
            env={"GLOO_SOCKET_IFNAME": hosts.interface},
        )
        for number, name in enumerate(hosts.names)
    ]


@fault("link-cut", "the link between two hosts is cut (bound 15 s)", waits=True)
def link_cut(lab: Lab) -> None:
    """No packet passes, and nobody is told. Both hosts end by themselves; the run resumes once the link is back."""
    with _two_hosts() as hosts:
        runs = _train(lab, hosts, IMPATIENT, "run", slow=True)
        struck = lab.strike(runs[0])
        hosts.cut()
        codes = [lab.detected(run, struck.time, _CUT, 90.0) for run in runs]
        assert all(codes), f"exit codes {codes}"
        hosts.restore()
        done, newest = max(losses_of(lab.folder / "run")), lab.newest("run")
        first, second = _train(lab, hosts, BASE, "resumed", "--resume", str(lab.folder / "run"))
        at, match = first.says(r"step (\d+)/12 ", SECONDS_TO_START)
        codes = [run.ends(SECONDS_TO_FINISH) for run in (first, second)]
        assert codes == [0, 0], f"exit codes {codes}"
        assert int(match[1]) == newest + 1, f"resumed with step {match[1]}; the newest checkpoint is of step {newest}"
        lab.row.recovered, lab.row.lost = at - struck.time, done - newest
        lab.compared(BASE, "resumed")
        lab.row.outcome = f"resumed from step {newest}; {lab.row.outcome}"


@fault("link-slow", "the link between two hosts slows to 200 kbit/s")
def link_slow(lab: Lab) -> None:
    """Training goes on, only slower."""
    with _two_hosts() as hosts:
        runs = _train(lab, hosts, BASE, "run", slow=True)
        lab.strike(runs[0])
        hosts.restore("200kbit")
        codes = [run.ends(SECONDS_TO_FINISH) for run in runs]
        assert codes == [0, 0], f"exit codes {codes}"
        lab.row.lost = 0
        lab.compared(BASE, "run")
