"""Verdicts on the page: claim cards, the scoreboard, and the line that says where a chapter's numbers come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape

from vitbook.show.claims import FAILS, HOLDS, UNJUDGED, UNSURE, Claim, Verdict, digits_of, number

MIME = "application/vnd.vitbook.verdicts+json"
# Word, symbol and colour together, so that none has to be read alone; white on each colour has a contrast above 4.5.
SYMBOLS = {HOLDS: "✓", FAILS: "✗", UNSURE: "?", UNJUDGED: "–"}
COLOURS = {HOLDS: "#00755A", FAILS: "#B0440B", UNSURE: "#5F6470", UNJUDGED: "#5F6470"}


class _Cards:
    """What `claim_cards` returns: shows itself as HTML or text, and carries the verdicts for the book's builder."""

    def __init__(self, pairs: list[tuple[Claim, Verdict]]) -> None:
        self._pairs = pairs

    def _repr_mimebundle_(self, **_: object) -> dict:
        return {
            "text/html": "".join(_card(claim, verdict) for claim, verdict in self._pairs),
            "text/plain": repr(self),
            MIME: [verdict.to_json() for _, verdict in self._pairs],
        }

    def __repr__(self) -> str:
        return "\n".join(
            f"{SYMBOLS[verdict.verdict]} {claim.id}: {verdict.verdict}. {claim.sentence} Measured: {claim.quantity}: "
            f"{measured(claim, verdict)}; asked for: {claim.rule}. Source {claim.source}: {claim.paper}."
            for claim, verdict in self._pairs
        )


def claim_cards(claims: Mapping[str, Claim], verdicts: Iterable[Verdict]) -> _Cards:
    """A card for each verdict. `claims` may hold more; a verdict without its claim is an error."""
    return _Cards([(_known(claims, verdict), verdict) for verdict in verdicts])


def scoreboard(
    claims: Mapping[str, Claim], verdicts: Iterable[Verdict], chapters: str = "notebooks/{chapter}.ipynb"
) -> str:
    """All claims as Markdown: a table that counts verdicts by chapter, then each chapter's claims, folded away.

    `chapters` is the path of a chapter, from the page the tables stand on. Profiles stand side by side, never mixed;
    what has no verdict is listed as not yet run.
    """
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(_known(claims, verdict).id, []).append(verdict)
    by_chapter: dict[str, list[Claim]] = {}
    for claim in claims.values():
        by_chapter.setdefault(claim.chapter, []).append(claim)
    counted = [
        [
            "chapter",
            "source",
            "claims",
            "profile",
            *(f"{SYMBOLS[v]} {v}" for v in (HOLDS, FAILS, UNSURE)),
            "not yet run",
        ]
    ]
    folded = []
    for chapter, its in sorted(by_chapter.items()):
        link, sources = f"[{chapter}]({chapters.format(chapter=chapter)})", ", ".join(sorted({c.source for c in its}))
        judged = [verdict for claim in its for verdict in found.get(claim.id, ())]
        for profile in dict.fromkeys(verdict.profile for verdict in judged) or ("–",):
            count = Counter(verdict.verdict for verdict in judged if verdict.profile == profile)
            counted.append(
                [
                    link,
                    sources,
                    len(its),
                    profile,
                    *(count[v] for v in (HOLDS, FAILS, UNSURE)),
                    len(its) - count.total(),
                ]
            )
        rows = [["claim", "source", "the source's value", "ours [95 % interval]", "verdict"]]
        for claim in its:
            for verdict in found.get(claim.id, [None]):
                ours = measured(claim, verdict) if verdict else "–"
                outcome = f"{SYMBOLS[verdict.verdict]} {verdict.verdict}" if verdict else "not yet run"
                rows.append([claim.sentence, claim.source, claim.paper, ours, outcome])
        folded.append(
            f"<details><summary>{chapter}: its {len(its)} claims, one by one</summary>\n\n{_table(rows)}\n\n</details>"
        )
    return "\n\n".join([_table(counted), *folded])


def _table(rows: list[list]) -> str:
    """Markdown; the first row is the head."""
    lines = [[escape(" ".join(str(cell).split()), quote=False).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ["-"] * len(rows[0]), *lines[1:]])


def measured(claim: Claim, verdict: Verdict) -> str:
    """Value, 95 % interval, seeds and profile of a verdict in one line."""
    digits = digits_of(claim, verdict)
    interval = f" [{', '.join(number(end, digits) for end in verdict.interval)}]" if verdict.interval else ""
    return f"{number(verdict.value, digits)}{interval} (n = {verdict.n}, {verdict.profile})"


class _Line:
    """One line of small print."""

    def __init__(self, text: str):
        self._text = text

    def _repr_html_(self) -> str:
        return f'<p style="font-size:.8em;opacity:.75">{escape(self._text)}</p>'

    def __repr__(self) -> str:
        return self._text


def provenance_line(provenances: Iterable[Mapping], profile: str) -> _Line:
    """What a chapter's numbers come from, in one line: how many records, made when, where and with what.

    `provenances`: what each record says of itself (commit, date, device, threads, precision, versions, seconds).
    """
    given = list(provenances)
    if not given:
        return _Line(f"Profile {profile}: no record yet.")

    def each(name: str, cut: int | None = None) -> str:
        return ", ".join(sorted({str(p[name])[:cut] for p in given if p[name] is not None}))

    versions = sorted({", ".join(f"{name} {text}" for name, text in p["versions"].items()) for p in given})
    return _Line(
        f"Profile {profile}: {len(given)} record{'s' * (len(given) > 1)}, "
        f"{sum(p['seconds'] for p in given) / 60:.0f} minutes of training, made {each('date', 10)} on {each('device')} "
        f"({each('threads')} thread, {each('precision')}) at commit {each('commit', 8)} with {'; '.join(versions)}."
    )


def _known(claims: Mapping[str, Claim], verdict: Verdict) -> Claim:
    if verdict.claim not in claims:
        raise ValueError(f"verdict on {verdict.claim!r}: no such claim; add it to the claims or correct its id")
    return claims[verdict.claim]


def _card(claim: Claim, verdict: Verdict) -> str:
    """One card in HTML. Text takes the page's colour and the ground is see-through, for light and dark pages alike."""
    colour = COLOURS[verdict.verdict]
    rows = [
        ("measured", escape(claim.quantity)),
        (f"source {escape(claim.source)}", f"{escape(claim.paper)} <small>({escape(claim.where)})</small>"),
        ("ours [95 %]" if verdict.interval else "ours", f"<strong>{escape(measured(claim, verdict))}</strong>"),
        ("holds if", escape(claim.rule)),
    ]
    if verdict.note:
        rows.append(("note", escape(verdict.note)))
    faint, plain = "opacity:.75;margin:0", "margin:0;min-width:0"
    table = "".join(f'<dt style="{faint}">{name}</dt><dd style="{plain}">{text}</dd>' for name, text in rows)
    records = f"records: {escape(', '.join(verdict.records))}" if verdict.records else "no record"
    return (
        f'<div role="group" aria-label="claim {escape(claim.id)}" style="border:1px solid rgba(128,128,128,.35);'
        f"border-left:6px solid {colour};border-radius:8px;background:rgba(128,128,128,.07);color:currentColor;"
        'padding:.7em 1em;margin:.7em 0;line-height:1.45">'
        '<div style="display:flex;flex-wrap:wrap;gap:.3em 1em;align-items:start;justify-content:space-between">'
        f'<span style="flex:1 1 16em;font-weight:600">{escape(claim.sentence)}</span>'
        f'<span style="background:{colour};color:#fff;border-radius:1em;padding:.05em .8em;white-space:nowrap">'
        f"{SYMBOLS[verdict.verdict]} {verdict.verdict}</span></div>"
        '<dl style="display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.1em 1em;margin:.5em 0 .3em">'
        f'{table}</dl><div style="font-size:.75em;opacity:.75;overflow-wrap:anywhere">'
        f"{escape(claim.id)} · {records}</div></div>"
    )
