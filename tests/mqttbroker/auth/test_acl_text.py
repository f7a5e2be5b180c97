"""Changes of the text of an ACL file: the rules change as asked, everything else stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqttbroker.auth.acl import parse_acl
from mqttbroker.auth.acl_text import AclRule, has_rule, rules_in, with_rule, without_rule

TEXT = """# Rules of the plant
topic read public/#

user alice
# her own
topic readwrite alice/#
topic deny alice/secret

pattern write devices/%c
user bob
topic bob/#
"""

ADDED = [
    (AclRule("alice", False, "read", "x"), "topic deny alice/secret\ntopic read x\n\npattern"),
    (AclRule("bob", False, "deny", "y"), "topic bob/#\ntopic deny y\n"),
    (AclRule("carol", False, "write", "z"), "topic bob/#\n\nuser carol\ntopic write z\n"),
    (AclRule(None, False, "read", "a b"), "topic read public/#\ntopic read a b\n\nuser alice"),
    (AclRule(None, True, "readwrite", "%u/#"), "pattern write devices/%c\npattern readwrite %u/#\nuser bob"),
]


@pytest.mark.parametrize(("rule", "place"), ADDED)
def test_an_added_rule_is_with_those_of_its_user_and_can_be_removed(rule: AclRule, place: str) -> None:
    changed = with_rule(TEXT, rule)
    assert place in changed and has_rule(changed, rule) and not has_rule(TEXT, rule)
    assert set(rules_in(parse_acl(changed, ""))) == {*rules_in(parse_acl(TEXT, "")), rule}
    kept = without_rule(changed, rule)
    assert set(rules_in(parse_acl(kept, ""))) == set(rules_in(parse_acl(TEXT, "")))
    assert [line for line in kept.split("\n") if "#" in line] == [line for line in TEXT.split("\n") if "#" in line]


def test_a_rule_without_access_is_readwrite_and_is_removed_wherever_it_is() -> None:
    rule = AclRule("bob", False, "readwrite", "bob/#")
    assert has_rule(TEXT, rule)
    twice = TEXT + "user bob\ntopic readwrite bob/#\n"
    assert "bob/#" not in without_rule(twice, rule) and without_rule(twice, rule).count("user bob") == 2


def test_first_rules_of_files_without_any() -> None:
    anonymous, alice = AclRule(None, False, "read", "#"), AclRule("alice", False, "read", "#")
    assert with_rule("", anonymous) == "topic read #\n"
    assert with_rule("# nothing", anonymous) == "# nothing\n\ntopic read #\n"
    assert with_rule("user alice\ntopic x\n", anonymous) == "topic read #\n\nuser alice\ntopic x\n"
    assert with_rule("user alice\n", alice) == "user alice\ntopic read #\n"
    assert with_rule("topic x\r\n", alice) == "topic x\r\n\r\nuser alice\r\ntopic read #\r\n"


RULES = st.builds(
    AclRule,
    username=st.sampled_from([None, "alice", "bob", "two words"]),
    pattern=st.just(False),
    access=st.sampled_from(["read", "write", "readwrite", "deny"]),
    topic_filter=st.sampled_from(["a", "a/+", "#", "b c/#", "deny"]),
)
STEPS = st.lists(st.tuples(st.booleans(), RULES | RULES.map(lambda rule: rule._replace(username=None, pattern=True))))


@settings(max_examples=50)
@given(text=st.sampled_from([TEXT, "", "# only a comment", "user alice"]), steps=STEPS)
def test_any_steps_have_the_effect_of_the_same_steps_on_a_set(text: str, steps: list[tuple[bool, AclRule]]) -> None:
    comments = [line for line in text.split("\n") if line.startswith("#")]
    expected = set(rules_in(parse_acl(text, "")))
    for add, rule in steps:
        if add and not has_rule(text, rule):
            text = with_rule(text, rule)
            expected.add(rule)
        elif not add:
            text = without_rule(text, rule)
            expected.discard(rule)
        assert set(rules_in(parse_acl(text, ""))) == expected
    assert [line for line in text.split("\n") if line.startswith("#")] == comments
