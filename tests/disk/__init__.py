"""Disks that fail and lose power: a layer below a broker process, and what its record proves."""
