"""Bugs for `calibrate` and for forecasts on a calibrated device."""

from __future__ import annotations

from planting import Bug

CALIBRATED = (
    Bug(
        "calibrated-recomputes-to-the-end",
        "LayerList._feedforward",
        "if stop:",
        "if stop and not keep:",
        "A recomputed layer multiplies by its last matrix again, whose output no backward needs.",
    ),
    Bug(
        "calibrated-gradients-of-logits-are-narrow",
        "_plain_loss",
        "tape.new(picked=wide)",
        "tape.new(picked=logits)",
        "Gradients of logits in bf16 take half of the bytes that they take.",
    ),
    Bug(
        "calibrated-norms-keep-no-roots",
        "LayerList.norm",
        "root: 4 * self.tokens",
        "root: 0",
        "A norm keeps no root of each row for its backward.",
    ),
    Bug(
        "calibrated-foreach-holds-nothing",
        "_update",
        "_meanwhile(tape, kind, numbers * setting.width)",
        "_meanwhile(tape, kind, 0)",
        "AdamW by lists needs no list of roots, so a step without activations peaks too low.",
    ),
    Bug(
        "calibrated-fused-counts-on-the-host",
        "_standing",
        'if setting.optimizer in ("adamw", "muon"):',
        'if setting.optimizer == "adamw-loop":',
        "Steps that the fused optimizer counts on the device take no bytes there.",
    ),
    Bug(
        "calibrated-keys-are-never-repeated",
        "LayerList.repeats",
        "self.width == 4 and self.keys < self.queries",
        "self.width == 2 and self.keys < self.queries",
        "Shared keys are repeated in the wrong number format.",
    ),
    Bug(
        "calibrated-tf32-everywhere",
        "StepTape.run",
        'if self.dtype == "tf32" and not kind.startswith("product")',
        'if self.dtype == "tf33"',
        "Forecasts in tf32 look for norms and sums in a format that products alone have.",
    ),
    Bug(
        "calibrated-workspace-is-free",
        "StepTape.run",
        "self.live + self._needs[work]",
        "self.live",
        "What a kernel needs while it runs does not count.",
    ),
    Bug(
        "calibrated-price-of-the-nearest",
        "plane",
        "[:_NEAREST]",
        "[:1]",
        "Between measured sizes, the factor of the nearest one holds, as in a staircase.",
    ),
    Bug(
        "calibrated-host-without-tensors",
        "Forecaster._host",
        "parts.append(self._line(setting.optimizer, sizes))",
        "parts.append(0.0)",
        "The host updates all tensors in no time.",
    ),
    Bug(
        "calibrated-host-adds-to-the-device",
        "Forecaster._raw",
        "total = device + host if self._calibration.on_host else max(device, host)",
        "total = device + host",
        "An accelerator waits for the host in every step.",
    ),
    Bug(
        "calibrated-judged-by-others",
        "Forecaster._ratio",
        "if sums.host_bound == raw.host_bound",
        "if sums.seconds",
        "Steps that wait for the host say how far the device's are off.",
    ),
    Bug(
        "calibrated-width-of-an-infinite-number",
        "Forecaster._interval",
        "* math.sqrt(1 + 1 / len(ratios))",
        "",
        "The interval takes the median of few real steps for certain.",
    ),
    Bug(
        "calibrated-backward-contains-its-forward",
        "_Run._measured",
        "seconds - besides.seconds",
        "seconds",
        "A backward is measured with the forward before it, which counts twice.",
    ),
    Bug(
        "calibrated-time-is-never-over",
        "_Run._measure_works",
        "if self._spent() > 1 and at > 0:",
        "if self._spent() > 1e9:",
        "A calibration measures everything, however long that takes.",
    ),
    Bug(
        "calibrated-kernels-count-twice",
        "covered",
        "max(stop - max(start, end), 0)",
        "stop - start",
        "Kernels that overlap count twice in the share in which the device computes.",
    ),
    Bug(
        "calibrated-fused-loss-of-a-sum",
        "FusedLoss.forward",
        "shares.div_(len(hidden))",
        "shares",
        "Gradients of the fused loss are those of the sum over tokens.",
    ),
    Bug(
        "calibrated-plan-takes-any-flag",
        "_check",
        "if action.dest not in _SHARED and getattr(args, action.dest) != action.default:",
        "if action.dest in _SHARED and False:",
        "A forecast of one device accepts a degree of parallelism and ignores it.",
    ),
)
