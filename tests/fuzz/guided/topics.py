"""Topic names and filters: syntax and matching against a reference that compares lists of levels."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.guided.target import Target
from fuzz.reference import is_filter, is_topic
from fuzz.verdict import Finding
from mqttbroker.auth.acl import covers
from topic_matcher.filters import is_valid_filter, is_valid_topic, matches, parse_shared
from topic_matcher.topic_tree import TopicTree
from topic_matcher.trie import SubscriptionTrie

TEXTS = 12  # of an input that are used


def is_match(topic_filter: str, topic: str) -> bool:
    """Section 4.7."""
    if topic[0] == "$" and topic_filter[0] in "+#":
        return False
    return _levels_match(topic_filter.split("/"), topic.split("/"))


def _levels_match(wanted: list[str], levels: list[str]) -> bool:
    if not wanted:
        return not levels
    if wanted[0] == "#":
        return True
    return bool(levels) and wanted[0] in ("+", levels[0]) and _levels_match(wanted[1:], levels[1:])


class Topics(Target):
    """The input is topics and filters, one per line; each is used as both."""

    modules = ("topic_matcher.filters", "topic_matcher.trie", "topic_matcher.topic_tree")
    words = (b"/", b"+", b"#", b"$share/g/", b"$SYS/", b"/+/", b"/#", b"\n", b"//")
    max_bytes = 300

    def check(self, data: bytes) -> None:
        texts = data.decode("utf-8", "replace").split("\n")[:TEXTS]
        for text in texts:
            if is_valid_topic(text) is not is_topic(text):
                raise Finding(f"topic {text!r} is {'valid' if is_topic(text) else 'invalid'}")
            if is_valid_filter(text) is not is_filter(text):
                raise Finding(f"filter {text!r} is {'valid' if is_filter(text) else 'invalid'}")
        topics = list(dict.fromkeys(filter(is_topic, texts)))
        filters = list(dict.fromkeys(filter(is_filter, texts)))
        plain = list(dict.fromkeys((parse_shared(text) or ("", text))[1] for text in filters))
        for text in plain:
            for topic in topics:
                if matches(text, topic) is not is_match(text, topic):
                    raise Finding(f"{text!r} and {topic!r}: {is_match(text, topic)} is right")
        self._search(plain, topics)
        self._cover(plain, topics)

    def _search(self, filters: list[str], topics: list[str]) -> None:
        """Trie and tree give what comparing each filter with each topic gives."""
        trie, tree = SubscriptionTrie(), TopicTree()
        for text in filters:
            trie.insert(text, 1, text)
        for topic in topics:
            tree.set(topic, topic)
        for removed in range(2):
            for topic in topics:
                found = sorted(map(str, trie.match(topic)))
                if found != sorted(text for text in filters if is_match(text, topic)):
                    raise Finding(f"the trie has {found} for {topic!r} of {filters}")
            for text in filters:
                stored = sorted(str(entry.value) for entry in tree.match(text))
                if stored != sorted(topic for topic in topics if is_match(text, topic)):
                    raise Finding(f"the tree has {stored} for {text!r} of {topics}")
            if removed == 0:
                for text in filters[1::2]:
                    trie.remove(text, 1)
                for topic in topics[1::2]:
                    tree.pop(topic)
                filters, topics = filters[::2], topics[::2]

    def _cover(self, filters: list[str], topics: list[str]) -> None:
        for wide in filters:
            for narrow in filters:
                if covers(wide, narrow):
                    for topic in topics:
                        if is_match(narrow, topic) and not is_match(wide, topic):
                            raise Finding(f"{wide!r} does not cover {narrow!r}, because of {topic!r}")

    def seeds(self) -> Iterator[bytes]:
        yield b"a/b\na/+\n#\n+/b\na/#\na"
        yield b"$SYS/x\n$SYS/#\n#\n+/x\n$share/g/#\n$share/g/a/+"
        yield "a//b\n/\n+/+/+\n//\nü/\U0001f600\n+".encode()
        yield b"a/b/c/d\na/b/c\na/b\na/b/#\na/+/c/#\n+/b/+/d\na/b/c/d/e"
