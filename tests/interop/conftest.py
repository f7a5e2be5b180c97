"""Makes pytest rewrite the assertions of the shared suite, as it does for test modules."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("suite", "client")
