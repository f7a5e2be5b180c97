"""Disk failures and power losses: a layer below a broker process, and the checks of its record."""
