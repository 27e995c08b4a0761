"""Claims and verdicts: the rule against intervals worked out by hand, every broken claim refused by name, the cards."""

import json
from dataclasses import replace

import numpy as np
import pytest

from vitbook.show import Claim, Verdict, claim_cards, half_interval, judge, load_claims, pooled_spread, scoreboard

T2 = 4.302652729911275  # Student's t, 97.5 %, two degrees of freedom, from a printed table
CLAIM = Claim(
    id="b-local",
    source="B",
    chapter="02_heads",
    sentence="An early layer is local.",
    where="section 4",
    quantity="distance over uniform",
    comparison="<",
    threshold=0.9,
    paper="0.49",
)
YAML = """
b-local:
  source: B
  chapter: 02_heads
  sentence: An early layer is local.
  where: section 4
  quantity: distance over uniform
  comparison: "<"
  threshold: 0.9
  paper: "0.49"
"""


def claim(comparison: str, threshold, margin=None) -> Claim:
    return replace(CLAIM, comparison=comparison, threshold=threshold, margin=margin)


# --- verdicts


def test_interval_is_the_t_interval_over_seeds():
    # 1, 2, 3: mean 2, sd 1, standard error 1/sqrt(3).
    verdict = judge(claim("<", 5), [1, 2, 3], profile="desk", records=["r1", "r2", "r3"])
    half = T2 / np.sqrt(3)
    assert verdict.value == 2 and verdict.n == 3
    assert verdict.interval == pytest.approx((2 - half, 2 + half), rel=1e-9)
    assert verdict.records == ("r1", "r2", "r3")


@pytest.mark.parametrize(
    ("comparison", "threshold", "margin", "expected"),
    [  # the interval of 1, 2, 3 is [-0.484, 4.484]
        ("<", 4.5, None, "holds"),
        ("<", 4.4, None, "cannot tell at this scale"),
        ("<", -0.4, None, "cannot tell at this scale"),
        ("<", -0.5, None, "does not hold"),
        ("<=", 4.5, None, "holds"),
        ("<=", -0.5, None, "does not hold"),
        (">", -0.5, None, "holds"),
        (">", -0.4, None, "cannot tell at this scale"),
        (">", 4.5, None, "does not hold"),
        (">=", -0.5, None, "holds"),
        (">=", 4.5, None, "does not hold"),
        ("within", (-0.5, 4.5), None, "holds"),
        ("within", (-0.4, 4.5), None, "cannot tell at this scale"),
        ("within", (1.9, 2.1), None, "cannot tell at this scale"),
        ("within", (4.5, 9.0), None, "does not hold"),
        ("within", (-9.0, -0.5), None, "does not hold"),
        ("==", 2.0, 2.5, "holds"),
        ("==", 2.0, 2.4, "cannot tell at this scale"),
        ("==", 6.0, 1.5, "does not hold"),
    ],
)
def test_verdict_by_side_of_the_threshold(comparison, threshold, margin, expected):
    assert judge(claim(comparison, threshold, margin), [1, 2, 3], profile="desk").verdict == expected


def test_half_an_interval_of_a_mean_and_of_a_difference():
    assert half_interval((2.0, 1), 1) == pytest.approx(2 * 12.7062, rel=1e-5)  # Student's t at 97.5 %, 1 d.o.f.
    assert half_interval((2.0, 4), 3, 6) == pytest.approx(2.7764 * 2 * (1 / 3 + 1 / 6) ** 0.5, rel=1e-4)


def test_one_seed_borrows_the_pooled_spread_and_says_so():
    # Squares about the means: 2 (of 1, 2, 3) and 8 (of 4, 8), on 2 + 1 degrees of freedom; the lone seed adds nothing.
    deviation, dof = pooled_spread([[1, 2, 3], [4, 8], [7]])
    assert (deviation, dof) == (pytest.approx(np.sqrt(10 / 3)), 3)
    verdict = judge(claim("<", 10), [4.0], profile="desk", pooled_sd=(0.5, 2))
    assert verdict.interval == pytest.approx((4 - 0.5 * T2, 4 + 0.5 * T2), rel=1e-9)
    assert verdict.verdict == "holds" and "pooled" in verdict.note and "2 d.o.f." in verdict.note
    assert judge(claim("<", 6.1), [4.0], profile="desk", pooled_sd=(0.5, 2)).verdict == "cannot tell at this scale"


def test_few_values_without_any_spread_tell_nothing():
    below = claim(comparison="<", threshold=1.0)
    assert judge(below, [0.2] * 4, profile="desk").verdict == "cannot tell at this scale"
    assert judge(below, [0.2] * 5, profile="desk").verdict == "holds"  # five on one side: 1 in 32 by chance
    assert judge(below, [0.2, 0.4], profile="desk", pooled_sd=(0.0, 3)).verdict == "cannot tell at this scale"
    for spread in ((np.nan, 3), (0.1, 0), (np.inf, 2)):
        with pytest.raises(ValueError, match="is no spread"):
            judge(below, [0.2, 0.4], profile="desk", pooled_sd=spread)


def test_printed_digits_do_not_contradict_the_verdict():
    exact = claim(comparison=">=", threshold=0.125)
    verdict = judge(exact, 0.12499999, profile="desk", exact=True)
    assert "0.12499999 (n = 1, desk)" in repr(claim_cards({exact.id: exact}, [verdict]))
    whole = claim(comparison="<", threshold=2401001)
    assert "< 2401001" in repr(claim_cards({whole.id: whole}, [judge(whole, 1.0, profile="desk", exact=True)]))


def test_the_spread_with_more_degrees_of_freedom_is_taken():
    values = [1, 2, 3]  # s = 1 on 2 degrees of freedom
    own = judge(claim("<", 5), values, profile="desk", pooled_sd=(100, 2))
    assert own.interval[1] == pytest.approx(2 + T2 / np.sqrt(3)) and not own.note
    lent = judge(claim("<", 5), values, profile="desk", pooled_sd=(0.3, 3))
    assert lent.interval[1] == pytest.approx(2 + 3.182446 * 0.3 / np.sqrt(3)) and "3 seeds; spread pooled" in lent.note
    agreeing = judge(claim("<", 1), [0, 0], profile="desk", pooled_sd=(2.0, 4))  # whole numbers that agree by chance
    assert agreeing.interval[1] == pytest.approx(2.776445 * 2 / np.sqrt(2)) and agreeing.verdict.startswith("cannot")


def test_one_seed_without_spread_cannot_tell():
    verdict = judge(claim("<", 1e9), [4.0], profile="desk")
    assert verdict.verdict == "cannot tell at this scale" and verdict.interval is None
    with pytest.raises(ValueError, match="no spread"):
        pooled_spread([[1], [2]])


@pytest.mark.parametrize(
    ("comparison", "threshold", "value", "expected"),
    [
        ("<", 1, 1, "does not hold"),
        ("<=", 1, 1, "holds"),
        (">", 1, 1, "does not hold"),
        (">=", 1, 1, "holds"),
        ("==", 2_400_586, 2_400_586, "holds"),
        ("==", 2_400_586, 2_400_587, "does not hold"),
        ("within", (1, 2), 2, "holds"),
        ("within", (1, 2), 2.1, "does not hold"),
    ],
)
def test_a_number_without_chance_is_compared_as_it_is(comparison, threshold, value, expected):
    verdict = judge(claim(comparison, threshold), value, profile="desk", exact=True)
    assert verdict.verdict == expected and verdict.interval is None and verdict.n == 1


def test_smoke_judges_nothing():
    verdict = judge(CLAIM, [0.1, 0.1, 0.1], profile="smoke")
    assert verdict.verdict == "not judged" and verdict.interval is None and verdict.value == pytest.approx(0.1)


@pytest.mark.parametrize("values", [[1.0, float("nan")], [], float("inf"), [[1.0, 2.0]]])
def test_values_that_are_no_numbers_are_refused(values):
    with pytest.raises(ValueError, match=r"b-local.*finite numbers"):
        judge(CLAIM, values, profile="desk")


def test_questions_that_no_interval_answers_are_refused():
    with pytest.raises(ValueError, match=r"b-local.*margin"):
        judge(claim("==", 1), [1, 1], profile="desk")
    with pytest.raises(ValueError, match=r"b-local.*exact"):
        judge(CLAIM, [1, 1], profile="desk", exact=True)


def test_verdict_survives_json():
    for verdict in (
        judge(CLAIM, [0.5, 0.6], profile="desk", records=["r1"]),
        judge(CLAIM, 0.5, profile="paper", exact=True),
    ):
        assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


# --- claims


def test_claims_from_text_and_from_a_file(tmp_path):
    path = tmp_path / "claims.yml"
    path.write_text(YAML, encoding="utf-8")
    assert load_claims(YAML) == load_claims(path) == load_claims(str(path)) == {"b-local": CLAIM}
    within = load_claims(YAML.replace('"<"', "within").replace("0.9", "[0.9, 1.1]"))["b-local"]
    assert within.threshold == (0.9, 1.1) and within.rule == "within [0.9, 1.1]"
    equal = load_claims(YAML.replace('"<"', '"=="') + "  margin: 0.05\n")["b-local"]
    assert equal.margin == 0.05 and equal.rule == "= 0.9 ± 0.05"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"<"', '"<<"', "b-local.*comparison.*one of"),
        ("0.9", "soon", "b-local.*threshold.*number.*soon"),
        ("0.9", ".nan", "b-local.*threshold.*number"),
        ("0.9", "true", "b-local.*threshold.*number"),
        ('"<"', "within", "b-local.*threshold.*low < high"),
        ('"<"\n  threshold: 0.9', "within\n  threshold: [2, 1]", "b-local.*threshold.*low < high"),
        ('"0.49"', "0.49", "b-local.*paper.*quotes"),
        ("source: B", "sauce: B", "b-local.*sauce.*no such field"),
        ("  where: section 4\n", "", "b-local.*where.*text"),
        ('paper: "0.49"', 'paper: "0.49"\n  margin: 1', "b-local.*margin.*belongs"),
        ('paper: "0.49"', 'paper: "0.49"\n  source: C', "source given twice"),
        (YAML, YAML + YAML, "b-local given twice"),
        (YAML, "- a\n- b\n", "mapping"),
    ],
)
def test_a_broken_claim_is_refused_by_name(old, new, named):
    assert old in YAML
    with pytest.raises(ValueError, match=named):
        load_claims(YAML.replace(old, new))


# --- cards and scoreboard


def test_cards_show_the_verdict_in_words_and_carry_it_for_the_builder():
    verdict = judge(CLAIM, [0.5, 0.6, 0.7], profile="desk", records=["abc123"])
    bundle = claim_cards({"b-local": replace(CLAIM, sentence="Local <early> layers.")}, [verdict])._repr_mimebundle_()
    assert bundle["application/vnd.vitbook.verdicts+json"] == [verdict.to_json()]
    html, text = bundle["text/html"], bundle["text/plain"]
    for part in ("✓ holds", "Local &lt;early&gt; layers.", "0.49", "0.6 [0.3516, 0.8484] (n = 3, desk)", "abc123"):
        assert part in html
    assert "✓ b-local: holds" in text and "&lt; 0.9" in html
    with pytest.raises(ValueError, match=r"b-local.*no such claim"):
        claim_cards({}, [verdict])


def test_scoreboard_counts_by_chapter_and_profile_and_folds_the_claims_away():
    claims = {
        "b-local": replace(CLAIM, sentence="A | B < C"),
        "b-late": replace(CLAIM, id="b-late", chapter="03_ladder"),
        "a-far": replace(CLAIM, id="a-far", source="A"),
    }
    verdicts = [judge(CLAIM, [0.5, 0.6, 0.7], profile="desk"), judge(CLAIM, [1.0, 1.1, 1.2], profile="paper")]
    counts, heads, ladder = scoreboard(claims, verdicts, chapters="../n/{chapter}.md").split("\n\n<details>")
    assert counts.splitlines() == [
        "| chapter | source | claims | profile | ✓ holds | ✗ does not hold | ? cannot tell at this scale "
        "| not yet run |",
        "| - | - | - | - | - | - | - | - |",
        "| [02_heads](../n/02_heads.md) | A, B | 2 | desk | 1 | 0 | 0 | 1 |",
        "| [02_heads](../n/02_heads.md) | A, B | 2 | paper | 0 | 0 | 1 | 1 |",
        "| [03_ladder](../n/03_ladder.md) | B | 1 | – | 0 | 0 | 0 | 1 |",
    ]
    assert heads.splitlines() == [
        "<summary>02_heads: its 2 claims, one by one</summary>",
        "",
        "| claim | source | the source's value | ours [95 % interval] | verdict |",
        "| - | - | - | - | - |",
        r"| A \| B &lt; C | B | 0.49 | 0.6 [0.3516, 0.8484] (n = 3, desk) | ✓ holds |",
        r"| A \| B &lt; C | B | 0.49 | 1.1 [0.8516, 1.348] (n = 3, paper) | ? cannot tell at this scale |",
        "| An early layer is local. | A | 0.49 | – | not yet run |",
        "",
        "</details>",
    ]
    assert ladder.startswith("<summary>03_ladder: its 1 claims") and "| – | not yet run |" in ladder
    with pytest.raises(ValueError, match=r"b-late.*no such claim"):
        scoreboard({"b-local": CLAIM}, [replace(verdicts[0], claim="b-late")])
