"""Bugs for `runtime`: what a followed model is watched for, what its values are called, what its loss counts."""

from __future__ import annotations

from planting import Bug

FOLLOWED = (
    Bug(
        "ignored-labels-count",
        "labels_counted",
        "return counts.sum()",
        "return torch.tensor(counts.numel())",
        "Microbatches count by all labels, padding included.",
    ),
    Bug(
        "labels-ignored-by-default",
        "counted",
        "return labels_counted(value_of(tally.target), tally.ignored, weight)",
        "return labels_counted(value_of(tally.target), -100, weight)",
        "A model's own ignore_index is not what is left out when its labels are counted.",
    ),
    Bug(
        "ignored-labels-weigh",
        "labels_counted",
        "(weight.double()[classes] * counts).sum()",
        "weight.double()[classes].sum()",
        "An ignored label counts with the weight of the first class.",
    ),
    Bug(
        "rows-taken-for-inside",
        "_works_inside",
        "all(dim == -1 or dim >= 1 for dim in dims)",
        "all(dim == -1 or dim >= 0 for dim in dims)",
        "A softmax over the rows of a batch passes for one inside of each.",
    ),
    Bug(
        "penalty-beside-a-sum",
        "Walk._follow",
        "            self.has_constant = True  # a penalty on parameters\n",
        "",
        "A penalty beside a loss that is summed is added once for every microbatch.",
    ),
    Bug(
        "hooks-are-counted",
        "Watch._now",
        "states += [[*map(list, tables)] for tables in map(_TABLES, spaces) if any(tables)]",
        "states += [[*map(len, tables)] for tables in map(_TABLES, spaces) if any(tables)]",
        "A hook in the place of another does not make the model be followed again.",
    ),
    Bug(
        "attributes-of-functions-stay",
        "_inside",
        "parts += (*table, *table.values())",
        "pass",
        "A look does not notice another attribute or default of a function that forward calls.",
    ),
    Bug(
        "tuples-never-change",
        "is_settled",
        "all(map(is_settled, value))",
        "True",
        "A look does not notice what changes inside of a tuple that forward reads.",
    ),
    Bug(
        "set-before-it-is-read",
        "Attributes.read",
        "not uses.is_read_first and BETWEEN not in uses.setters:",
        "not uses.is_read_first:",
        "A forward that sets an attribute and reads it afterwards is refused when it sets it twice.",
    ),
    Bug(
        "readers-behind-a-cut",
        "Attributes.judge.inside",
        "inside = sorted((uses.readers | uses.setters) - {BETWEEN})",
        "inside = sorted(uses.setters - {BETWEEN})",
        "A cut may stand between a block that sets an attribute and one that reads it.",
    ),
    Bug(
        "changed-in-place-alike",
        "Names._name",
        "            self._versions[self.graph.values[number].storage] = name\n",
        "            pass\n",
        "A value keeps its name when it is changed in place, so that two different ones have one name.",
    ),
)
