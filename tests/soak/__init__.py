"""`make soak`: memory under a long load without garbage collector."""
