"""Claims and verdicts: a source's sentence as quantity, comparison and threshold, judged by rule.

The rule: a claim *holds* (*does not hold*) when the 95 % interval of the quantity, a t interval over seeds, lies wholly
on the claim's side (on the other side) of the threshold; else one *cannot tell at this scale*. Two or three seeds say
little of their own spread (two of them: t = 12.7); that of the chapter's replicated configurations, pooled, stands in
where it has more degrees of freedom. Few values that agree to the last digit (layers are counted, not measured) have no
spread to make an interval of: one cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from pathlib import Path

import numpy as np
import yaml
from scipy import stats

HOLDS, FAILS = "holds", "does not hold"
UNSURE, UNJUDGED = "cannot tell at this scale", "not judged"
ALIKE = 5  # equal values that tell something without any spread: all on one side by chance, once in 2⁵ = 32 times
COMPARISONS = ("<", ">", "<=", ">=", "==", "within")


@dataclass(frozen=True)
class Claim:
    """One sentence of a source, made testable before it is tested.

    `threshold` is a number, for "within" a pair (low, high). `margin` belongs to "==" and makes "no effect" testable:
    within threshold ± margin. `paper` is the source's own value, as printed there.
    """

    id: str
    source: str
    chapter: str
    sentence: str
    where: str
    quantity: str
    comparison: str
    threshold: float | tuple[float, float]
    paper: str
    margin: float | None = None

    @property
    def rule(self) -> str:
        """The rule in symbols, such as "< 0.25" or "within [0.9, 1.1]"."""
        if self.comparison == "within":
            return f"within [{number(self.threshold[0], 12)}, {number(self.threshold[1], 12)}]"
        sign = "=" if self.comparison == "==" else self.comparison
        return f"{sign} {number(self.threshold, 12)}" + (f" ± {number(self.margin, 12)}" if self.margin else "")


@dataclass(frozen=True)
class Verdict:
    """What was measured for a claim and what follows: mean `value` over `n` seeds, 95 % `interval` or None."""

    claim: str
    verdict: str
    value: float
    interval: tuple[float, float] | None
    n: int
    profile: str
    records: tuple[str, ...] = ()
    note: str = ""

    def to_json(self) -> dict:
        """A dictionary that JSON can hold; `from_json` reads it back."""
        plain = asdict(self)
        return plain | {"interval": self.interval and list(self.interval), "records": list(self.records)}

    @classmethod
    def from_json(cls, plain: Mapping) -> Verdict:
        interval = plain["interval"]
        return cls(**{**plain, "interval": interval and tuple(interval), "records": tuple(plain["records"])})


def load_claims(path_or_text: Path | str) -> dict[str, Claim]:
    """Read claims from a YAML file, or from YAML text of several lines, and check every field.

    Raises ValueError naming the claim, the field and the rule it breaks.
    """
    text = str(path_or_text)
    if isinstance(path_or_text, Path) or "\n" not in text:
        text = Path(path_or_text).read_text(encoding="utf-8")
    entries = yaml.load(text, _UniqueKeys)
    if not isinstance(entries, dict) or not entries:
        raise ValueError("claims: give a mapping from claim id to its fields")
    return {str(name): _claim(str(name), entry) for name, entry in entries.items()}


class _UniqueKeys(yaml.SafeLoader):
    """YAML as usual, but a key given twice is an error instead of a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            line = node.start_mark.line + 1
            raise ValueError(f"claims: {', '.join(twice)} given twice below line {line}; rename or remove one")
        return super().construct_mapping(node, deep)


def _claim(name: str, entry: object) -> Claim:
    def refuse(field: str, rule: str) -> ValueError:
        given = entry.get(field) if isinstance(entry, dict) else entry
        return ValueError(f"claim {name!r}, {field}: {rule}, not {given!r}")

    if not isinstance(entry, dict):
        raise refuse("fields", "must be a mapping")
    allowed = [field.name for field in fields(Claim) if field.name != "id"]
    for field in entry:
        if field not in allowed:
            raise ValueError(f"claim {name!r}, {field}: no such field; the fields are {', '.join(allowed)}")
    for field in allowed:
        if field not in ("threshold", "margin") and not (isinstance(entry.get(field), str) and entry[field].strip()):
            raise refuse(field, "must be text (put numbers in quotes)")
    if entry["comparison"] not in COMPARISONS:
        raise refuse("comparison", f"must be one of {' '.join(COMPARISONS)}")
    threshold, margin = entry.get("threshold"), entry.get("margin")
    if entry["comparison"] == "within":
        pair = isinstance(threshold, list) and len(threshold) == 2 and all(map(_is_number, threshold))
        if not pair or threshold[0] >= threshold[1]:
            raise refuse("threshold", "must be [low, high] with low < high")
        threshold = (float(threshold[0]), float(threshold[1]))
    elif not _is_number(threshold):
        raise refuse("threshold", "must be a finite number (YAML wants 1.0e-5 for 1e-5)")
    else:
        threshold = float(threshold)
    if margin is not None and not (entry["comparison"] == "==" and _is_number(margin) and margin > 0):
        raise refuse("margin", 'must be a positive number and belongs to the comparison "=="')
    return Claim(**{**entry, "id": name, "threshold": threshold, "margin": margin})


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def pooled_spread(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation over seeds pooled over configurations, and its degrees of freedom.

    Groups of one seed tell nothing about spread and are passed over; ValueError if no group has two.
    """
    replicated = [np.asarray(group, dtype=float) for group in groups if len(group) > 1]
    if not replicated:
        raise ValueError("no configuration has two seeds or more: there is no spread to pool")
    dof = sum(len(group) - 1 for group in replicated)
    squares = sum(((group - group.mean()) ** 2).sum() for group in replicated)
    return math.sqrt(squares / dof), dof


def half_interval(spread: tuple[float, int], *counts: int) -> float:
    """Half of a 95 % Student's interval, of a mean over ``counts[0]`` seeds or of a sum or difference of several means.

    `spread` = (sd of one value, its degrees of freedom), as `pooled_spread` gives it; the means share no run.
    """
    sd, dof = spread
    return float(stats.t.ppf(0.975, dof) * sd * math.sqrt(sum(1 / n for n in counts)))


def judge(
    claim: Claim,
    values: float | Sequence[float],
    *,
    profile: str,
    records: Sequence[str] = (),
    pooled_sd: tuple[float, int] | None = None,
    exact: bool = False,
) -> Verdict:
    """The verdict on `claim` from `values`, one number a seed.

    `pooled_sd` = (sd of one value, degrees of freedom), see `pooled_spread`, stands in for the spread of the values
    themselves when it has more degrees of freedom: give that of runs which scatter like these. With one seed and
    without it one cannot tell, nor where fewer than five values have no spread at all. `exact=True` compares a single
    number without chance as it is.
    The profile "smoke" judges nothing. Raises ValueError for no value, for one that is not finite, for several with
    `exact`, for a spread that is none, and for "==" without a margin where chance is involved.
    """
    seeds = np.atleast_1d(np.asarray(values, dtype=float))
    if seeds.ndim != 1 or not len(seeds) or not np.isfinite(seeds).all():
        raise ValueError(f"claim {claim.id!r}: values must be finite numbers, one a seed, not {values!r}")
    if exact and len(seeds) > 1:
        raise ValueError(f"claim {claim.id!r}: exact compares one number without chance; {len(seeds)} were given")
    if pooled_sd is not None and not (0 <= pooled_sd[0] < math.inf and pooled_sd[1] >= 1):
        raise ValueError(f"claim {claim.id!r}: pooled_sd={pooled_sd!r} is no spread with degrees of freedom")
    if claim.comparison == "==" and claim.margin is None and not exact:
        raise ValueError(f"claim {claim.id!r}: no interval can show equality; give the claim a margin")
    value, interval, note = float(seeds.mean()), None, ""
    if profile == "smoke":
        verdict, note = UNJUDGED, "a smoke run shows that the code works, nothing else"
    elif exact:
        verdict, note = _compare(claim, value, value), "compared as it is: no chance involved"
    elif len(seeds) == 1 and pooled_sd is None:
        verdict, note = UNSURE, "one seed, and no replicated configuration to take a spread from"
    else:
        n = len(seeds)
        if pooled_sd is not None and pooled_sd[1] > n - 1:
            deviation, dof = pooled_sd
            few = "one seed" if n == 1 else f"{n} seeds"
            note = f"{few}; spread pooled over replicated configurations: sd {number(deviation)}, {dof} d.o.f."
        else:
            deviation, dof = seeds.std(ddof=1), n - 1
        half = half_interval((float(deviation), dof), n)
        if half <= 1e-12 * max(1.0, abs(value)) and n < ALIKE:
            verdict, note = UNSURE, "no spread, for all values agree: so few may do so by chance"
        else:
            interval = (value - half, value + half)
            verdict = _compare(claim, *interval)
    return Verdict(claim.id, verdict, value, interval, len(seeds), profile, tuple(records), note)


def _compare(claim: Claim, low: float, high: float) -> str:
    """Where [low, high] lies against the threshold; a number without chance is an interval of no width."""
    threshold = claim.threshold
    if claim.comparison in ("==", "within"):
        margin = claim.margin or 0.0
        floor, ceiling = threshold if claim.comparison == "within" else (threshold - margin, threshold + margin)
        holds, fails = floor <= low and high <= ceiling, high < floor or low > ceiling
    else:
        holds, fails = {
            "<": (high < threshold, low >= threshold),
            "<=": (high <= threshold, low > threshold),
            ">": (low > threshold, high <= threshold),
            ">=": (low >= threshold, high < threshold),
        }[claim.comparison]
    return HOLDS if holds else FAILS if fails else UNSURE


def number(value: float, digits: int = 4) -> str:
    """Four significant digits, unless told otherwise."""
    return f"{value:.{digits}g}"


def digits_of(claim: Claim, verdict: Verdict) -> int:
    """As many digits, four at least, as keep a verdict's printed numbers on their side of the threshold."""
    ends = verdict.interval or (verdict.value, verdict.value)
    same = _compare(claim, *ends)
    return next(n for n in range(4, 18) if _compare(claim, *(float(number(end, n)) for end in ends)) == same)
