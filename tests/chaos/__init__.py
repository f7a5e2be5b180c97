"""`make chaos`: kills a broker under load and checks every guarantee on acknowledged messages."""
