"""How long a test waits for what must come."""

from __future__ import annotations

# Seconds. A broker without a defect may need many of them: one fsync takes seconds on a disk that other programs write to.
PATIENCE = 30.0
