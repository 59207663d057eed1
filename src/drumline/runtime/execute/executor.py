"""Run one rank's row: exactly the actions of the proven program, in order.

The row, with explicit communication, is translated once into jobs. A job that computes has three parts:

    0F3    take: the batch, a local stage's output, or a message    call: stage.forward    put: its output

A step then runs the jobs, in one loop for all schedules: wait for the job's messages, take, compute, put. If a message
has not arrived, the run yields what it waits for; its driver then blocks on the channel, or lets another rank continue.
What only some steps do, and schedules without a flush, are other jobs, not other loops: see `replacements.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from drumline.model.values import pack, unpack, with_kinds
from drumline.model.weights.tied import Ties
from drumline.runtime.draft import BEGIN, NOTE, POST, Clock, Draft
from drumline.runtime.execute.jobs import Job, absent, merge, nothing
from drumline.runtime.execute.replacements import in_turns, is_whole, weighed
from drumline.runtime.gradients.exchange import Ending, GradientExchange
from drumline.runtime.gradients.lines import Shards, Sums
from drumline.runtime.gradients.summed import SummedExchange
from drumline.runtime.stage import Stage
from drumline.runtime.stash import Scale
from drumline.runtime.step import Step

Gradients = tuple[Tensor | None, ...]
Replacing = Callable[[Iterable[Job], Step], Iterable[Job]]


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
        exchanged = (rank, stages, channel, self.placement, ties)
        self.exchange = GradientExchange(*exchanged) if reducer is None else SummedExchange(reducer, shards, *exchanged)
        self.endings = self._endings()
        self.current: Action | None = None
        self.watched: Callable[[Job], Job] | None = None  # returns what runs instead of a job of a watched step
        self._has_pairs = any(action.op is Op.OVERLAP for action in program.rows[rank])
        self.takes_turns = False  # whether the halves of an overlapped pair run in turns, at their exchanges
        self.replacing: Sequence[Replacing] = ()  # return what runs instead of jobs, one after the other
        self.replace_jobs()
        self.draft = Draft(rank)  # of the current step
        self._gathering: dict[int, int] = {}  # since when each stage's parameters are gathered
        self._outputs: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Gradients] = {}
        self.arrived: dict[Action, Delivery] = {}  # messages waiting for their job
        self.jobs = self.translated()

    def running(self, program: Program) -> Executor:
        """Return an executor of another program, with the same stages on the same rank."""
        arguments, ties = (self.rank, self.stages, self.channel, self.clock), self.exchange.ties
        executor = Executor(
            program, *arguments, merge_weight_gradients=self.merge, scale=self.scale, ties=ties, shards=self.shards
        )
        executor.exchange, executor.endings = self.exchange, self.endings  # one step runs at a time
        return executor

    def divide(self, shards: Shards) -> None:
        """Divide the parameters of some stages between the lines of a mesh."""
        self.shards = shards
        if isinstance(self.exchange, SummedExchange):
            self.exchange.shards = shards
        self.jobs = self.translated()

    def replace_jobs(self) -> None:
        """Follow `watched`, `takes_turns` and `scale`: in the steps from now on, what they ask for replaces jobs."""
        asked = {
            self._watched: self.watched is not None,
            self._in_turns: self.takes_turns and self._has_pairs,
            self._weighed: self.scale is not None,
        }
        self.replacing = [replacing for replacing, is_asked in asked.items() if is_asked]

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
        needs = []
        for alternatives in rules.needs(action, self.program.num_stages):
            producer = alternatives[0]
            message = rules.message(producer, self.program.num_stages)
            if message is None or producer.stage == action.stage or producer.microbatch is None:
                continue
            source = self.placement.rank_of(producer.stage, producer.microbatch)
            if source != self.rank:
                needs.append((message.recv, source))
        return needs

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

    def run(self, step: Step, draft: Draft, jobs: Iterable[Job]) -> Generator[Wait, None, None]:
        """Run the jobs of the row, yielding whenever it must wait for a message; finally exchange the gradients.

        The draft records what the rank does, piece by piece.
        """
        channel, clock, stages, now = self.channel, self.clock, self.stages.values(), self.clock.now
        self._begin(step, draft)
        for replace in self.replacing:
            jobs = replace(jobs, step)
        directly = False
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
                for part in job.parts or (job,):
                    # In one expression: a name would keep a tensor that nobody needs any more.
                    part.put(part, step, part.call(part.microbatch, *part.take(part, step)))
                draft.starts.append(start)
                draft.ends.append(clock.mark())
                ended = now()
                draft.held.append(sum([len(stage.passes) for stage in stages]))
                draft.spent(NOTE, ended, now())
            elif job.waits:
                yield from job.run(job, step)
            else:
                job.run(job, step)
            directly = job.timed
        for ending in self.endings:
            yield from ending(clock, draft)
        draft.end_ns = now()
        self.current = None

    def _begin(self, step: Step, draft: Draft) -> None:
        """Start a step: nothing is left of the one before."""
        self._outputs.clear()
        self._gradients.clear()
        self.arrived.clear()
        self.exchange.begin()
        self.draft = draft
        self.channel.begin(step.number, train=step.train, program=self.code)
        self.clock.begin(draft)
        for stage in self.stages.values():
            stage.begin()
            stage.outputs = step.outputs if step.wants_outputs else None
        draft.spent(BEGIN, draft.begin_ns, self.clock.now())

    def _endings(self) -> Sequence[Ending]:
        """Return what finishes a step whose jobs are done: it exchanges the gradients, where ranks have the same."""
        return self.exchange.endings

    def _watched(self, jobs: Iterable[Job], step: Step) -> Iterable[Job]:
        assert self.watched is not None
        return map(self.watched, jobs)

    def _in_turns(self, jobs: Iterable[Job], step: Step) -> Iterable[Job]:
        return (in_turns(job) if job.parts else job for job in jobs)

    def _weighed(self, jobs: Iterable[Job], step: Step) -> Iterator[Job]:
        assert self.scale is not None
        self.scale.begin(*step.inputs, *step.targets)
        for job in jobs:
            # Halves that take turns are weighed after both.
            yield weighed(job, self.scale) if job.timed and not is_whole(job) else job
            if job.timed:
                yield Job(job.action, self._weigh)

    def _weigh(self, job: Job, step: Step) -> None:
        """Record the bytes that are held after an action."""
        assert self.scale is not None
        start = self.clock.now()
        size, peak = self.scale.weigh_action()
        self.draft.stash.append(size)
        self.draft.peaks.append(peak)
        self.draft.spent(NOTE, start, self.clock.now())

    def _inputs(self, job: Job, step: Step) -> tuple[Any, ...]:
        """Return the arguments of a forward: its value, its target, and whether a backward follows."""
        index, microbatch = job.action.stage, job.microbatch
        if index == 0:
            value = step.inputs[microbatch]
        else:
            delivery = self.arrived.pop(Action(index, Op.RECV_F, microbatch), None)
            value = (
                self._outputs.pop((index - 1, microbatch))
                if delivery is None
                else unpack(delivery.tensors, delivery.form)
            )
        wants_target = step.targets and job.stage is not None and job.stage.loss is not None
        return value, step.targets[microbatch] if wants_target else None, step.train

    def _keep_output(self, job: Job, step: Step, output: Any) -> None:
        index, microbatch = job.action.stage, job.microbatch
        if index < self.program.num_stages - 1:
            self._outputs[index, microbatch] = output
        elif step.train:
            step.losses[microbatch] = output
        else:
            has_loss = job.stage is not None and job.stage.loss is not None
            value, loss = output if has_loss else (output, None)
            if step.wants_outputs:  # those of a whole batch take more memory than a step of training
                step.outputs[microbatch] = value
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

    def _keep_gradients(self, job: Job, step: Step, gradients: Gradients) -> None:
        if job.action.stage > self.lowest:
            self._gradients[job.action.stage, job.microbatch] = gradients

    def _post(self, job: Job, step: Step) -> None:
        start = self.clock.now()
        self.channel.post(job.action, job.other)
        self.draft.spent(POST, start, self.clock.now())

    def _send(self, job: Job, step: Step) -> None:
        self.hand_over(self.clock.now(), job.other, *self.message(job))

    def hand_over(self, start: int, target: int, receive: Action, tensors: tuple[Tensor, ...], form: Any) -> None:
        """Send a message, and record it; `start` is when this began."""
        self.channel.send(receive, target, tensors, form)
        self.draft.sent(receive, target, sum([tensor.nbytes for tensor in tensors]), start, self.clock.now())

    def message(self, job: Job) -> tuple[Action, tuple[Tensor, ...], Any]:
        """Release what a job sends: return the action that receives it, its tensors and their form."""
        stage, op, microbatch, _ = job.action
        if op is Op.SEND_F:
            tensors, form = pack(self._outputs.pop((stage, job.microbatch)))
            form = with_kinds(tensors, form) if self.channel.copies else form
            return Action(stage + 1, Op.RECV_F, microbatch), tensors, form
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
