"""Lets pytest explain a failed assertion of the shared suite as it does for the tests themselves."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("suite", "client")
