"""Run one rank's row: exactly the actions of the proven program, in order.

The row, with explicit communication, is translated once into jobs. A job that computes has three parts:

    0F3    take: the batch, a local stage's output, or a message    call: stage.forward    put: its output

A step then runs the jobs. If a message has not arrived, the run yields what it waits for; its driver then blocks on the
channel, or lets another rank continue.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from drumline.channel.channel import Channel, Delivery, Wait
from drumline.core import rules
from drumline.core.action import STATE_OPS, Action, Op
from drumline.core.errors import ProgramError
from drumline.core.program import Program
from drumline.core.prove.opening import openings
from drumline.core.rules import Backward
from drumline.model.values import pack, unpack
from drumline.model.weights.tied import Ties
from drumline.runtime.draft import BEGIN, NOTE, POST, Clock, Draft
from drumline.runtime.execute.jobs import Job, absent, merge, nothing
from drumline.runtime.execute.turns import run_both
from drumline.runtime.gradients.exchange import GradientExchange
from drumline.runtime.gradients.lines import Shards, Sums
from drumline.runtime.gradients.witness import Witness
from drumline.runtime.stage import Stage
from drumline.runtime.stash import Scale
from drumline.runtime.step import Step

Gradients = tuple[Tensor | None, ...]


class Executor:
    """One rank's stages and row."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel,
        clock: Clock,
        *,
        merge_weight_gradients: bool = False,
        scale: Scale | None = None,
        ties: Ties | None = None,
        reducer: Sums | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.program = program
        self.shards = shards
        self.rank = rank
        self.stages = stages
        self.channel = channel
        self.clock = clock
        self.placement = program.placement
        self.code = 0  # a byte that distinguishes the program from others of the pipeline
        self.lowest = program.backwards.count(Backward.NONE)  # stages below this one need no gradients
        self.merge = merge_weight_gradients
        self.scale = scale
        self.exchange = GradientExchange(rank, stages, channel, self.placement, ties, reducer, shards)
        self.current: Action | None = None
        self.witnesses: Sequence[Witness] = ()  # of a step that is checked, one for each microbatch
        self.takes_turns = False  # whether the halves of an overlapped pair run in turns, at their exchanges
        self.draft = Draft(rank)  # of the current step
        self._gathering: dict[int, int] = {}  # since when each stage's parameters are gathered
        self._made: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self.arrived: dict[Action, Delivery] = {}  # messages waiting for their job
        self.jobs = self.translated()

    def running(self, program: Program) -> Executor:
        """Return an executor of another program, with the same stages on the same rank."""
        own, ties = (self.rank, self.stages, self.channel, self.clock), self.exchange.ties
        made = Executor(
            program, *own, merge_weight_gradients=self.merge, scale=self.scale, ties=ties, shards=self.shards
        )
        made.exchange = self.exchange  # one step runs at a time
        return made

    def translated(self) -> list[Job]:
        """Return the jobs of this rank's row."""
        row = self.program.rows[self.rank]
        # For each computing op: take, the stage's method, put.
        works: dict[Op, tuple[Callable[..., Any], str, Callable[..., Any]]] = {
            Op.FORWARD: (self._inputs, "forward", self._keep_output),
            Op.BACKWARD: (self._gradients_of, "backward", self._keep_gradients),
            Op.BACKWARD_INPUT: (self._gradients_of, "backward_input", self._keep_gradients),
            Op.BACKWARD_WEIGHT: (nothing, "backward_weight", nothing),
        }
        talks: dict[Op, Callable[[Job, Step], None]] = {
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._post,
            Op.RECV_B: self._post,
            Op.REDUCE_GRAD: self._exchange,
        }
        # State actions take a rank's time, so they are timed as computes are.
        states: dict[Op, Callable[..., Any]] = {Op.UNSHARD: self._unshard, Op.RESHARD: self._reshard}
        jobs: list[Job] = []
        gathering: set[int] = set()
        for action in row:
            if self.shards is not None and action.is_compute:
                for stage in sorted({part.stage for part in action.work} & gathering):
                    gathering.discard(stage)
                    jobs.append(Job(Action(stage, Op.UNSHARD), self._await_unshard))
            if action.op is Op.UNSHARD:
                gathering.add(action.stage)
            if action.op in talks:
                job = Job(action, talks[action.op], self.stages.get(action.stage), other=self._other(action))
                job.microbatch = -1 if action.microbatch is None else action.microbatch
            elif action.op is Op.OVERLAP:
                parts = tuple(self._work(part, *works[part.op]) for part in action.parts)
                job = Job(action, needs=tuple(need for part in parts for need in part.needs), timed=True, parts=parts)
            elif action.op in works:
                job = self._work(action, *works[action.op])
            elif action.op in states:
                job = Job(action, timed=True, call=partial(states[action.op], action.stage))
            else:
                raise ProgramError(
                    f"rank {self.rank}'s row has {action}",
                    expected="a synchronous program: you update the weights, and the executor itself waits",
                    fix="choose a schedule without UPDATE and WAITs",
                )
            jobs.append(job)
        if self.merge:
            merge(jobs)
        return jobs

    def _work(self, action: Action, take: Callable[..., Any], call: str, put: Callable[..., Any]) -> Job:
        """Return the job of a computing action."""
        stage, microbatch, needs = self.stages.get(action.stage), action.microbatch, tuple(self._needs(action))
        assert microbatch is not None
        job = Job(action, stage=stage, microbatch=microbatch, needs=needs, timed=True, take=take, put=put)
        job.call = getattr(stage, call, absent)
        return job

    def _needs(self, action: Action) -> list[tuple[Action, int]]:
        """Return the messages that a plain action needs, with the ranks that send them."""
        found = []
        for alternatives in rules.needs(action, self.program.num_stages):
            producer = alternatives[0]
            message = rules.message(producer, self.program.num_stages)
            if message is None or producer.stage == action.stage or producer.microbatch is None:
                continue
            source = self.placement.rank_of(producer.stage, producer.microbatch)
            if source != self.rank:
                found.append((message.recv, source))
        return found

    def _other(self, action: Action) -> int:
        if action.op in STATE_OPS:
            return next((rank for rank in self.placement.ranks_of(action.stage) if rank != self.rank), -1)
        assert action.microbatch is not None, f"{action} belongs to no microbatch"
        message = rules.message_of(action)
        peer = message.recv if action == message.send else message.send
        return self.placement.rank_of(peer.stage, action.microbatch)

    def gated(self, accepts: Callable[[], bool]) -> Iterator[Job]:
        """Yield the jobs of the row's opening, and if `accepts` then says so, the rest."""
        jobs, (opening, rest) = {job.action: job for job in self.jobs}, openings(self.program)[self.rank]
        for action in opening:
            yield jobs[action]
        start = self.clock.now()
        if accepts():
            self.draft.spent(BEGIN, start, self.clock.now())
            for action in rest:
                yield jobs[action]

    def run(self, step: Step, draft: Draft, jobs: Iterable[Job] | None = None) -> Generator[Wait, None, None]:
        """Run the row, yielding whenever it must wait for a message; finally exchange the gradients.

        `jobs`, if given, replace those of the row. The draft records what the rank does, piece by piece.
        """
        jobs = self.jobs if jobs is None else jobs
        jobs = [self._before(job) for job in jobs] if self.witnesses else jobs
        channel, clock, stages, now = self.channel, self.clock, self.stages.values(), self.clock.now
        self._reset()
        self.draft = draft
        channel.begin(step.number, train=step.train, program=self.code)
        clock.begin(draft)
        for stage in stages:
            stage.begin()
            stage.kept = step.outputs if step.wants_outputs else None
        if self.scale is not None:
            self.scale.begin(*step.inputs, *step.targets)
        directly = False
        draft.spent(BEGIN, draft.begin_ns, now())
        for job in jobs:
            self.current = job.action
            for receive, source in job.needs:
                asked = now()
                delivery = channel.take(receive, source)
                if delivery is None:
                    since, wait = asked, Wait(self.rank, job.action, receive, source)
                    while delivery is None:
                        yield wait
                        asked = now()
                        delivery = channel.take(receive, source)
                    draft.waited(since, asked)
                self.arrived[receive] = delivery
                draft.took(receive, source, delivery, asked, now())
            if job.timed:
                start = clock.start(directly and not job.needs)
                if job.parts and self.takes_turns:
                    self._in_turns(job, step)
                elif self.scale is None:
                    for part in job.parts or (job,):
                        part.put(part, step, part.call(part.microbatch, *part.take(part, step)))
                else:
                    self._weighed(job, step, self.scale)
                draft.starts.append(start)
                draft.ends.append(clock.mark())
                ended = now()
                directly = True
                draft.held.append(sum([len(stage.held) for stage in stages]))
                if self.scale is not None:
                    size, peak = self.scale.weigh_action()
                    draft.stash.append(size)
                    draft.peaks.append(peak)
                draft.spent(NOTE, ended, now())
            else:
                job.run(job, step)
                directly = False
        yield from self.exchange.finish(clock, draft)
        draft.end_ns = now()
        self.current = None

    @staticmethod
    def _in_turns(job: Job, step: Step) -> None:
        """Run both halves of a pair: one computes while the other waits for an exchange."""
        calls = [partial(part.call, part.microbatch, *part.take(part, step)) for part in job.parts]
        forward, backward = calls  # autograd runs in this thread
        for part, made in zip(job.parts, reversed(run_both(backward, forward)), strict=True):
            part.put(part, step, made)

    @staticmethod
    def _weighed(job: Job, step: Step, scale: Scale) -> None:
        with scale.watching():
            for part in job.parts or (job,):
                part.put(part, step, part.call(part.microbatch, *part.take(part, step)))
                if job.parts:
                    scale.weigh()  # between the two, the stash holds both the forward's and the backward's

    def _reset(self) -> None:
        self._made.clear()
        self._gradients.clear()
        self.arrived.clear()
        self.exchange.begin()

    def _before(self, job: Job) -> Job:
        """Return a job of a watched step: a witness sees what concerns its microbatch."""
        if job.parts:
            return replace(job, parts=tuple(self._before(part) for part in job.parts))
        stage, op = job.stage, job.action.op
        watching = [one for one in self.witnesses if one.microbatch in (job.together or (job.microbatch,))]
        if stage is None or not watching:
            return job
        if job.together:
            return replace(job, call=partial(self._alone_and_merged, watching, stage, job.together))
        if op is Op.BACKWARD_WEIGHT and job.call is not nothing:
            return replace(job, call=partial(watching[0].weighing, stage))
        if op is Op.BACKWARD:
            return replace(job, call=partial(watching[0].adding, stage, job.call))
        return replace(job, call=partial(watching[0].listening, stage, job.call)) if op is Op.FORWARD else job

    @staticmethod
    def _alone_and_merged(watching: Sequence[Witness], stage: Stage, together: Sequence[int], _: int) -> None:
        for witness in watching:
            witness.weighing(stage, witness.microbatch)
        if rest := [one for one in together if all(one != witness.microbatch for witness in watching)]:
            stage.backward_weight_merged(rest)

    def _inputs(self, job: Job, step: Step) -> tuple[Any, ...]:
        """Return the arguments of a forward: its value, its target, and whether a backward follows."""
        index, microbatch = job.action.stage, job.microbatch
        if index == 0:
            value = step.inputs[microbatch]
        else:
            delivery = self.arrived.pop(Action(index, Op.RECV_F, microbatch), None)
            value = (
                self._made.pop((index - 1, microbatch)) if delivery is None else unpack(delivery.tensors, delivery.form)
            )
        wants_target = step.targets and job.stage is not None and job.stage.loss is not None
        return value, step.targets[microbatch] if wants_target else None, step.train

    def _keep_output(self, job: Job, step: Step, made: Any) -> None:
        index, microbatch = job.action.stage, job.microbatch
        if index < self.program.num_stages - 1:
            self._made[index, microbatch] = made
        elif step.train:
            step.losses[microbatch] = made
        elif job.stage is None or job.stage.loss is None:
            step.outputs[microbatch] = made
        else:
            step.outputs[microbatch], loss = made
            if loss is not None:
                step.losses[microbatch] = loss

    def _gradients_of(self, job: Job, step: Step) -> tuple[Gradients]:
        """Return the gradients of a stage's output, one for each of its tensors."""
        index, microbatch = job.action.stage, job.microbatch
        if index == self.program.num_stages - 1:
            share = step.shares[microbatch].to(step.losses[microbatch].dtype)
            return ((share if step.factor == 1.0 else share * step.factor,),)
        delivery = self.arrived.pop(Action(index, Op.RECV_B, microbatch), None)
        if delivery is None:
            return (self._gradients.pop((index + 1, microbatch)),)
        return (delivery.tensors if delivery.form is None else tuple(unpack(delivery.tensors, delivery.form)),)

    def _keep_gradients(self, job: Job, step: Step, made: Gradients) -> None:
        if job.action.stage > self.lowest:
            self._gradients[job.action.stage, job.microbatch] = made

    def _post(self, job: Job, step: Step) -> None:
        start = self.clock.now()
        self.channel.post(job.action, job.other)
        self.draft.spent(POST, start, self.clock.now())

    def _send(self, job: Job, step: Step) -> None:
        self.hand_over(self.clock.now(), job.other, *self.message(job))

    def hand_over(self, start: int, target: int, receive: Action, tensors: tuple[Tensor, ...], form: Any) -> None:
        """Send a message, and record it; `start` is when this began."""
        self.channel.send(receive, target, tensors, form)
        self.draft.sent(receive, target, sum([one.nbytes for one in tensors]), start, self.clock.now())

    def message(self, job: Job) -> tuple[Action, tuple[Tensor, ...], Any]:
        """Release what a job sends: return the action that receives it, its tensors and their form."""
        stage, op, microbatch, _ = job.action
        if op is Op.SEND_F:
            return Action(stage + 1, Op.RECV_F, microbatch), *pack(self._made.pop((stage, job.microbatch)))
        receive, gradients = Action(stage - 1, Op.RECV_B, microbatch), self._gradients.pop((stage, job.microbatch))
        if len(gradients) == 1 and gradients[0] is not None:
            return receive, (gradients[0],), None
        return receive, *pack(gradients)

    def _exchange(self, job: Job, step: Step) -> None:
        """Offer this stage's gradients to whoever else holds it; they are summed at the end of the row."""
        assert job.stage is not None
        start = self.clock.now()
        self.exchange.offer(job.action, job.stage, job.other, self.clock)
        self.draft.spent(POST, start, self.clock.now())

    def _unshard(self, stage: int, _: int) -> None:
        """Begin to gather a stage's parameters, if lines of a mesh divide them."""
        if self.shards is not None:
            self._gathering[stage] = self.clock.now()
            self.shards.unshard(stage)

    def _await_unshard(self, job: Job, step: Step) -> None:
        assert self.shards is not None
        self.shards.gathered(job.action.stage)
        self.stages[job.action.stage].refresh()
        self.draft.exchanges.extend((job.action.stage, self._gathering[job.action.stage], self.clock.now()))

    def _reshard(self, stage: int, _: int) -> None:
        """Free a stage's whole parameters."""
        if self.shards is not None:
            self.shards.reshard(stage)
            self.stages[stage].refresh()  # or they would keep the memory
