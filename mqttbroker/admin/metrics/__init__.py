"""Figures of a running broker: `/metrics`, `$SYS`, histograms, history, consumer lag."""
