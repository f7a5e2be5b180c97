"""Administration: HTTP, metrics, `$SYS`, backup and repair."""
