"""Topic levels as columns: `sensors/{plant}/{machine}/temperature`.

A pattern is a topic filter with named wildcards.  `{name}` matches one level, like `+`.  `{name...}`, only at the end,
matches all following levels, like `#`; they are joined by `/`, and NULL if there are none.  `+` and `#` are allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topic_matcher.filters import is_valid_filter

_LEVEL = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}")


class PatternError(ValueError):
    """An invalid pattern; the message completes a sentence that names the option."""


@dataclass(frozen=True)
class TopicPattern:
    """``levels`` are (name, level number) pairs; ``rest`` is the name and first level of `{name...}`."""

    filter: str
    levels: tuple[tuple[str, int], ...]
    rest: tuple[str, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in (*self.levels, *((self.rest,) if self.rest else ())))

    def split(self, topic: str) -> list[str | None]:
        """The named levels of a topic that matches the filter, in the order of `names`."""
        parts = topic.split("/")
        found: list[str | None] = [parts[number] for _, number in self.levels]
        if self.rest is not None:
            found.append("/".join(parts[self.rest[1] :]) if len(parts) > self.rest[1] else None)
        return found


def parse_pattern(text: str) -> TopicPattern:
    """Parse a pattern; raises `PatternError`."""
    parts = text.split("/")
    levels: list[tuple[str, int]] = []
    rest: tuple[str, int] | None = None
    for number, part in enumerate(parts):
        match = _LEVEL.fullmatch(part)
        if match is None:
            if "{" in part or "}" in part:
                raise PatternError(f"{part!r} is not a level's name like {{plant}}")
        elif match[2] is None:
            levels.append((match[1], number))
            parts[number] = "+"
        elif number < len(parts) - 1:
            raise PatternError(f"{part!r} can only be the last level")
        else:
            rest = (match[1], number)
            parts[number] = "#"
    pattern = TopicPattern("/".join(parts), tuple(levels), rest)
    names = [name.lower() for name in pattern.names]
    if not names:
        raise PatternError(f"{text!r} names no level like {{plant}}")
    for name in names:
        if names.count(name) > 1:
            raise PatternError(f"two levels are named {name!r}")
    if not is_valid_filter(pattern.filter) or pattern.filter.startswith("$share/"):
        raise PatternError(f"{text!r} is not an MQTT topic filter with names for its levels")
    return pattern
