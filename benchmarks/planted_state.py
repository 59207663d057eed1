"""Bugs for the state that blocks keep: found, put back, kept in one order, or refused."""

from __future__ import annotations

from planting import Bug

STATE = (
    Bug(
        "what-checks-take-is-gone",
        "_taken_back",
        "                spies.give_back()\n",
        "                pass\n",
        "The check of the first step uses up items of a block's iterator.",
    ),
    Bug(
        "surroundings-as-runs-left-them",
        "_taken_back",
        "            snapshot.rewind()\n",
        "",
        "Tracing and checks leave counters and generators outside of blocks changed.",
    ),
    Bug(
        "copies-change-what-they-like",
        "KeptApart._judge",
        "if stays or (forgets and",
        "if look.is_doubled or stays or (forgets and",
        "Two copies of a stage keep a counter each.",
    ),
    Bug(
        "stages-share-what-they-change",
        "KeptApart._judge",
        "if stays or (forgets and",
        "if not look.is_doubled or stays or (forgets and",
        "Two stages draw from one generator, in another order than plain training.",
    ),
    Bug(
        "copies-keep-the-old-function",
        "Twin._follow_others",
        "            vars(self.ours)[key] = value\n",
        "            pass\n",
        "A copy of a stage applies the function that the user has replaced.",
    ),
    Bug(
        "copies-without-hooks-behind-sums",
        "_follow",
        'if getattr(original, "_post_accumulate_grad_hooks", None) is not None:',
        "if False:",
        "A hook on summed gradients runs for half of the microbatches.",
    ),
    Bug(
        "changed-sums-unseen",
        "_looks",
        "if parameter.grad is not gradient or not",
        "if False and not",
        "A hook caps a part of a gradient's sum, and the other copy of the stage has the rest.",
    ),
    Bug(
        "aliases-of-weights-are-copied",
        "TiedCopies._copied",
        "for alias in aliases_in(block, self._trained):",
        "for alias in ():",
        "A copy of a block uses a view of a weight that no update reaches.",
    ),
    Bug(
        "aliases-between-processes",
        "_refuse_apart",
        "if placement.ranks_of(stage) == ranks:",
        "if False:",
        "A block uses a view of a weight that another process trains.",
    ),
    Bug(
        "put-back-unsaid",
        "Ledger.__exit__",
        "                self._altered.update(dict.fromkeys(reached))\n",
        "",
        "Nobody says that a generator is put back.",
    ),
    Bug(
        "batches-make-tables",
        "Recipes.call",
        "all(self._is_fixed(tensor) for tensor in tensors)",
        "True",
        "What a block makes of its batch and others find again may be cut from them.",
    ),
    Bug(
        "tables-that-others-make",
        "InsideBlocks._is_same_alone",
        "self.recipes.lines == lines",
        "True",
        "A block is cut from the one that makes the table it finds.",
    ),
    Bug(
        "tables-change-unseen",
        "Recipes._make",
        'self._number(("changed", line, self._tables[at]))',
        "self._tables[at]",
        "Blocks that change one table in place are cut from each other.",
    ),
    Bug(
        "functions-keep-stand-ins",
        "Surroundings.keeping_contents",
        "if at not in fills or _fill(cache) != fills[at]:",
        "if cache.cache_info().currsize != fills.get(at, (0, -1))[1]:",
        "After a trace a function with a memory of one result returns a tensor without values.",
    ),
    Bug(
        "counts-of-hooks-are-compared",
        "Relay._agree",
        "if not are_alike(mine, word.tensors):",
        "if False:",
        "Hooks of blocks that count are called a wrong trace, with ranks in several processes.",
    ),
    Bug(
        "entries-of-others",
        "are_apart",
        "all(owners.setdefault(entry, owner) == owner for entry in entries)",
        "True",
        "A stage reads an entry of a dict that another process changes.",
    ),
    Bug(
        "entries-share-objects",
        "Sharing.are_own_entries",
        "and sum(map(len, inside)) == len(set().union(*inside))",
        "",
        "Stages change one tensor that is in two entries of a dict.",
    ),
    Bug(
        "dicts-in-dicts",
        "Sharing.__init__",
        "if (identity, name) not in indirect:",
        "if True:",
        "A stage reads all entries of a dict that is itself an entry of another.",
    ),
)
