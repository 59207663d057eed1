"""Bugs for functions that call the model themselves, and for what trainers need beside their steps."""

from __future__ import annotations

from planting import Bug

CALLS = (
    Bug(
        "losses-of-functions-are-averaged",
        "FunctionSteps.train",
        "function(model, batch) * count",
        "function(model, batch)",
        "A step of functions trains on the mean of their losses, and not on the sum.",
    ),
    Bug(
        "repeated-batches-count",
        "FunctionSteps.__init__",
        "number < len(this()._batches)",
        "number >= 0",
        "A batch that runs again to fill a step counts twice.",
    ),
    Bug(
        "losses-draw-alike-in-every-step",
        "FunctionSteps._loss",
        "self._draws.again(self.number, self._step)",
        "self._draws.again(self.number, 0)",
        "What a loss draws after its call of the model is the same in every step.",
    ),
    Bug(
        "evaluations-in-training-mode",
        "FunctionSteps.evaluate",
        "step, train=False",
        "step, train=True",
        "A model is evaluated in training mode, as far as functions look at it.",
    ),
    Bug(
        "whole-group-again",
        "Ahead.outcome_of",
        "self._group[places[0] :] if places",
        "self._group if places",
        "Where a batch was left out, the next one gets its outcome.",
    ),
    Bug(
        "loaders-end-early",
        "Ahead.__iter__",
        "batch is _END or (says_end and self._loader.end_of_dataloader)",
        "batch is _END or not says_end or self._loader.end_of_dataloader",
        "Of a loader that does not say which batch is its last, only the first is evaluated.",
    ),
    Bug(
        "other-arguments-of-a-second-call",
        "_are_same",
        "all(value is others[name] for name, value in named.items())",
        "True",
        "A second call of the model with other rows gets the output of the first.",
    ),
    Bug(
        "positions-by-name",
        "_names_by_group",
        "[name for name, _ in model.named_parameters() if name in homes]",
        "sorted(homes)",
        "The positions of a whole optimizer's state are not those of one process.",
    ),
    Bug(
        "what-is-left-is-everything",
        "grouped",
        "left -= names",
        "left = set(left)",
        "A parameter group without names has the parameters of other groups as well.",
    ),
    Bug(
        "labels-are-not-shifted",
        "label_scores",
        "targets, scores = targets[:, 1:], scores[:, :-1]",
        "targets, scores = targets[:, :-1], scores[:, :-1]",
        "Logits are held against their own tokens instead of the next ones.",
    ),
    Bug(
        "prompts-at-the-end",
        "label_scores",
        "(logits.shape[1] - targets.shape[1], 0)",
        "(0, logits.shape[1] - targets.shape[1])",
        "Rows that a prompt adds in front take the labels of the text.",
    ),
    Bug(
        "a-number-in-store-stays",
        "put_numpys_words",
        "np.random.seed(0)",
        "None",
        "A state of NumPy's that is put back keeps the second normal number of another.",
    ),
    Bug(
        "pythons-number-in-store-is-lost",
        "put_pythons_state",
        "_generator.gauss_next = state[1]",
        "_generator.gauss_next = None",
        "A state of Python's that is put back has no second normal number in store.",
    ),
    Bug(
        "a-scaled-loss-is-taken-for-the-models",
        "_with_own_losses",
        "fresh = copy(output)",
        "fresh = output",
        "A function that scales a loss by name in place makes the first step's check fail.",
    ),
)
