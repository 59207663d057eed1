# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A pipeline of two stages
#
# This notebook trains ten layers, five on each of two ranks. A rank is a process. Each batch of 64 rows is cut into
# microbatches, which flow through the ranks. Only the *schedule* changes from run to run: the order in which each rank
# runs its forwards and backwards. We draw three schedules, run them, and compare the measurements with the formulas.
#
# It runs on two processes of this machine, on its CPU or its GPU, in about a minute.

# %%
import importlib.util

if importlib.util.find_spec("drumline") is None:
    # In a clone, the package is one folder up.
    # %pip install --quiet --editable "..[notebook]"
    pass

# %%
import os
import statistics
import tempfile

import matplotlib.pyplot as plt
import torch
from torch import nn

import drumline as dl

WIDTH = int(os.environ.get("DRUMLINE_WIDTH", "512"))  # wide enough that computing outweighs being called
EPOCHS = int(os.environ.get("DRUMLINE_EPOCHS", "5"))
RUNS = tempfile.mkdtemp()
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## On paper
#
# A schedule is data: rows of actions, one row per rank. `F` is a forward and `B` a backward. `I` and `W` are the two
# halves of a backward: the gradient of the input and the gradient of the weights. Point at a box or a gap to see what
# it is. Idle time is hatched, one colour per cause.

# %%
dl.simulate(dl.generate("gpipe", num_ranks=2, num_microbatches=4))

# %%
dl.simulate(dl.generate("1f1b", num_ranks=2, num_microbatches=4))

# %%
dl.simulate(dl.generate("zb-h1", num_ranks=2, num_microbatches=4))

# %% [markdown]
# With M microbatches, P ranks, equal stages and free messages, a flushed schedule keeps its ranks busy for
#
# $$\text{utilisation} = \frac{M}{M + P - 1}$$
#
# of the time. That is 4/5 here. GPipe and 1F1B differ in the activations they hold: GPipe stashes all M microbatches,
# 1F1B at most P - r of them on rank r. zb-h1 passes the bound: it fills the bubble with weight gradients.

# %%
for name in ("gpipe", "1f1b", "zb-h1"):
    timeline = dl.simulate(dl.generate(name, num_ranks=2, num_microbatches=4))
    print(f"{name:6s} utilisation {1 - timeline.bubble:.1%}, microbatches held {timeline.peak_activations}")

# %% [markdown]
# ## The model and its data
#
# 1024 points $x \sim N(0, I)$, and $y = A x + b$ with some noise.


# %%
def make_data():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1024, WIDTH, generator=random)
    weight = torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5
    bias = torch.randn(WIDTH, generator=random)
    return x, x @ weight.T + bias + 0.1 * torch.randn(x.shape, generator=random)


def make_model():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(10)]
    return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers[:-1]), layers[-1])


def batches():
    x, y = make_data()
    random = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(1024, generator=random).split(64):
            yield x[rows], y[rows]


# %% [markdown]
# ## Training by a schedule
#
# The loop is PyTorch's own, with `pipe.step` in place of forward and backward. `dl.launch` starts the two ranks and
# takes a function from a notebook cell. `record` names the folder for the measurements.


# %%
def train(schedule, num_microbatches, checkpoint, folder):
    pipe = dl.Pipeline(
        make_model().to(device),
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
        num_microbatches=num_microbatches,
        balance=[5, 5],
        checkpoint=checkpoint,
        record=folder,
    )
    optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-3)
    losses = []
    for x, y in batches():
        result = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
    weights = {name: value.cpu() for name, value in pipe.state_dict().items()}
    pipe.close()
    return losses, weights


def run(schedule, num_microbatches, checkpoint="none"):
    folder = f"{RUNS}/{schedule}-{num_microbatches}-{checkpoint}"
    (losses, first), (_, second) = dl.launch(train, schedule, num_microbatches, checkpoint, folder, num_ranks=2)
    return dl.read_run(folder), losses, first | second


trials = {name: run(name, 4) for name in ("gpipe", "1f1b", "zb-h1")}

# %% [markdown]
# ## The same as one process?
#
# The plain loop, without a pipeline. On a CPU the weights must agree to the last bit after all epochs.


# %%
def train_unsplit(num_microbatches):
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches():
        x, y = x.to(device), y.to(device)
        for rows, wanted in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
            loss = nn.functional.mse_loss(model(rows), wanted) / num_microbatches
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


torch.set_num_threads(1)  # as a rank computes: how a product is dealt to threads may change its last bits
expected = train_unsplit(4)
for name, (_, losses, weights) in trials.items():
    apart = max((weights[key] - expected[key]).abs().max().item() for key in expected)
    print(f"{name:6s} loss {losses[0]:.3f} to {losses[-1]:.3f}; largest difference of a weight: {apart:.2g}")
    assert apart == 0 or device != "cpu"

# %% [markdown]
# ## Measured beside its bound
#
# `dl.read_run` reads a recorded run from its folder. Every step has its figures. Measured timelines look like simulated
# ones.


# %%
def middle(run, name):
    return statistics.median(step[name] for step in run.metrics()[1:])


def bound(run):
    return 1 - dl.simulate(run.program).bubble


names = list(trials)
measured = [1 - middle(trials[name][0], "pp/bubble") for name in names]
bounds = [bound(trials[name][0]) for name in names]
for name, found, most in zip(names, measured, bounds, strict=True):
    print(f"{name:6s} utilisation {found:.1%} of at most {most:.1%}")

figure, axes = plt.subplots(figsize=(6, 3))
axes.bar(names, bounds, color="none", edgecolor="black", label="bound")
axes.bar(names, measured, width=0.6, label="measured")
axes.set_ylabel("utilisation")
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# One step of 1F1B as it was measured:

# %%
trials["1f1b"][0].timeline()

# %% [markdown]
# ## Queues and stash
#
# A message that was sent and not yet received waits in the queue of its edge. Activations that wait for their backward
# are the stash. GPipe stashes the whole batch; 1F1B at most two microbatches on rank 0 and one on rank 1.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
for name in names:
    timeline = trials[name][0].timeline(0)  # memory is measured in the first step of a run
    for edge, curve in timeline.queue_depths.items():
        if edge == (0, 1):
            left.step([at * 1e3 for at, _ in curve], [depth for _, depth in curve], where="post", label=name)
    track = timeline.tracks[0]
    right.step([at * 1e3 for at in track.ends], [size / 1024 for size in timeline.stash[0]], where="post", label=name)
left.set(title="queue from rank 0 to rank 1", xlabel="ms", ylabel="messages")
right.set(title="stash of rank 0", xlabel="ms", ylabel="KiB")
right.legend()
plt.show()

# %% [markdown]
# ## Eight microbatches, with and without checkpointing
#
# Eight microbatches raise the bound to 8/9. Checkpointing keeps only a stage's input and recomputes the rest in the
# backward: less stash, more work.

# %%
for name in ("gpipe", "1f1b"):
    for checkpoint in ("none", "full"):
        trials[f"{name}, M = 8, {checkpoint}"] = run(name, 8, checkpoint)

rows = []
for name, (found, _, _) in trials.items():
    peaks = [size / 1024 for size in found.timeline(0).peak_stash]
    rows.append(
        (name, 1e3 * middle(found, "pp/makespan_seconds"), 1 - middle(found, "pp/bubble"), bound(found), *peaks)
    )
print(f"{'':20s} step ms  utilisation  bound  stash KiB on rank 0, 1")
for name, milliseconds, found, most, first, second in rows:
    print(f"{name:20s} {milliseconds:7.1f} {found:12.1%} {most:6.1%} {first:10.0f} {second:8.0f}")

figure, axes = plt.subplots(figsize=(8, 3))
axes.barh([row[0] for row in rows][::-1], [row[4] for row in rows][::-1])
axes.set_xlabel("peak stash of rank 0, KiB")
plt.show()

# %% [markdown]
# ## Where to go from here
#
# - Another schedule: `dl.generate("zb-v", ...)`, or all of them at once: `drumline compare --ranks 2 --microbatches 8`.
# - Your own model in place of `make_model`: any module can be cut.
# - The same runs as one page: `drumline report` and the folders.
